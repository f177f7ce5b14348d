//! The API server as the publisher sees it: each call with its deadline, each
//! failure with what it means here.

use super::PublishOptions;
use super::probe;
use crate::pool::Support;
use crate::validate::Invalid;
use crate::wire::Slice;
use futures::Stream;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams, ListParams, ObjectList, PostParams, Preconditions, WatchParams};
use kube::core::{Request, WatchEvent};
use kube::{Client, ResourceExt};
use std::future::Future;
use std::time::Duration;
use tokio::time::timeout;

/// Why a session ended, or a synchronisation failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum PublishError {
    #[error("{call} failed")]
    Call { call: &'static str, source: Box<kube::Error> },
    #[error("{call} was not answered in {}s", .after.as_secs())]
    Timeout { call: &'static str, after: Duration },
    #[error("node {node} does not exist; slices need it as their owner")]
    NoNode { node: String },
    #[error("the watch ended: {why}")]
    Watch { why: String },
    #[error("somebody else changed slice {slice}; reading again")]
    Overtaken { slice: String },
    #[error("the API server refused slice {slice}: {message}")]
    Refused { slice: String, message: String },
    #[error("the API server still answers writes with something else after {passes} attempts")]
    Unsettled { passes: usize },
    #[error("the pool would be invalid")]
    Invalid(#[from] Invalid),
}

impl PublishError {
    /// Whether repeating does not help.
    pub(super) fn is_configuration(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::Unsettled { .. } | Self::Invalid(_))
    }
}

/// The calls that publishing needs.
pub(super) struct Server {
    client: Client,
    slices: Api<ResourceSlice>,
    nodes: Api<Node>,
    options: PublishOptions,
}

impl Server {
    pub(super) fn new(client: Client, options: &PublishOptions) -> Self {
        Self {
            slices: Api::all(client.clone()),
            nodes: Api::all(client.clone()),
            client,
            options: options.clone(),
        }
    }

    /// Selects the slices of our driver on our node.
    fn fields(&self) -> String {
        format!("spec.driver={},spec.nodeName={}", self.options.driver, self.options.node)
    }

    /// All of them, and the position from which to watch.
    pub(super) async fn list(&self) -> Result<ObjectList<ResourceSlice>, PublishError> {
        let params = ListParams::default().fields(&self.fields());
        self.call("list of slices", self.slices.list(&params)).await
    }

    /// Their changes since a position.
    pub(super) async fn watch(
        &self,
        position: &str,
    ) -> Result<impl Stream<Item = kube::Result<WatchEvent<ResourceSlice>>> + use<>, PublishError> {
        let seconds = u32::try_from(self.options.limits.watch.as_secs()).unwrap_or(u32::MAX);
        let params = WatchParams::default().fields(&self.fields()).timeout(seconds);
        self.call("watch of slices", self.slices.watch(&params, position)).await
    }

    /// For writes of slices, which are not of the type that is read.
    fn path(&self) -> Request {
        Request::new(self.slices.resource_url())
    }

    /// Stores a slice; the answer is what the server made of it.
    pub(super) async fn create(&self, slice: &Slice) -> Result<ResourceSlice, PublishError> {
        let name = slice.metadata.generate_name.clone().unwrap_or_default();
        let call = async {
            let request = self.path().create(&PostParams::default(), bytes(slice)?);
            self.client.request(request.map_err(kube::Error::BuildRequest)?).await
        };
        self.write("creation of a slice", name, call).await
    }

    /// Replaces the version of a slice that was read.
    pub(super) async fn update(&self, slice: &Slice) -> Result<ResourceSlice, PublishError> {
        let name = slice.metadata.name.clone().unwrap_or_default();
        let call = async {
            let request = self.path().replace(&name, &PostParams::default(), bytes(slice)?);
            self.client.request(request.map_err(kube::Error::BuildRequest)?).await
        };
        self.write("update of a slice", name.clone(), call).await
    }

    /// Deletes the version of a slice that was read; gone already is as good.
    pub(super) async fn delete(&self, slice: &ResourceSlice) -> Result<(), PublishError> {
        let name = slice.name_any();
        let preconditions = Preconditions {
            uid: slice.metadata.uid.clone(),
            resource_version: slice.metadata.resource_version.clone(),
        };
        let params = DeleteParams::default().preconditions(preconditions);
        let call = async {
            match self.slices.delete(&name, &params).await {
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
                other => other.map(drop),
            }
        };
        self.write("deletion of a slice", name.clone(), call).await
    }

    /// A write, with what its failures mean to us.
    async fn write<T>(
        &self,
        call: &'static str,
        slice: String,
        answer: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, PublishError> {
        self.call(call, answer).await.map_err(|error| match error {
            PublishError::Call { source, .. } if code(&source) == Some(409) || code(&source) == Some(404) => {
                PublishError::Overtaken { slice }
            }
            PublishError::Call { source, .. } if matches!(code(&source), Some(400 | 413 | 422)) => {
                PublishError::Refused { slice, message: source.to_string() }
            }
            other => other,
        })
    }

    /// One call within its deadline.
    async fn call<T>(
        &self,
        call: &'static str,
        answer: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, PublishError> {
        let after = self.options.limits.call;
        let answered = timeout(after, answer).await.map_err(|_| PublishError::Timeout { call, after })?;
        answered.map_err(|source| PublishError::Call { call, source: Box::new(source) })
    }

    /// UID of our Node object.
    pub(super) async fn node_uid(&self) -> Result<String, PublishError> {
        let node = self.call("read of the node", self.nodes.get_metadata_opt(&self.options.node)).await?;
        let uid = node.and_then(|node| node.metadata.uid);
        uid.ok_or_else(|| PublishError::NoNode { node: self.options.node.clone() })
    }

    /// `gitVersion`.
    pub(super) async fn version(&self) -> Result<String, PublishError> {
        Ok(self.call("read of the server version", self.client.apiserver_version()).await?.git_version)
    }

    /// What the server would keep of what we publish.
    pub(super) async fn probe(&self) -> Result<Support, PublishError> {
        let dry = PostParams { dry_run: true, field_manager: None };
        let mut answers = [None, None];
        for (slice, answer) in probe::pair(&self.options.driver, &self.options.node).iter().zip(&mut answers)
        {
            *answer = match self.call("dry run of a slice", self.slices.create(&dry, slice)).await {
                Ok(kept) => Some(kept),
                // A server that refuses the pair would refuse the pool.
                Err(PublishError::Call { source, .. }) if matches!(code(&source), Some(400 | 422)) => None,
                Err(error) => return Err(error),
            };
        }
        let [counters, devices] = answers;
        Ok(probe::support(counters.as_ref(), devices.as_ref()))
    }
}

fn bytes(slice: &Slice) -> kube::Result<Vec<u8>> {
    serde_json::to_vec(slice).map_err(kube::Error::SerdeError)
}

fn code(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}

/// An error with all its causes.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
