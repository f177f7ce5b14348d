//! Follows the ResourceSlices of the cluster: watches their metadata, and reads the slices that the
//! [`DeviceIndex`] asks for. The first summary is published when the kinds of all slices are known.

use crate::device_index::{DeviceIndex, DeviceSummary, Read, Slice, SliceMetadata};
use crate::metrics::Metrics;
use crate::readiness::{ControllerReadiness, ReadyCondition};
use crate::removal::{OffIndex, OffModes};
use divvy_api::names::DRIVER;
use divvy_api::text::error_chain;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use kube::api::{Api, GetParams};
use kube::core::Request;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Resource};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

/// Slices that are read at a time. A slice takes up to 100 KB.
const READS_MAX: usize = 4;
/// Pause between the starts of reads. While nodes are upgraded, thousands of slices lack the
/// annotation, and 200 reads a second are few for an API server.
const READ_PAUSE: Duration = Duration::from_millis(5);
/// Time limit of one read.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Initial and maximum pause after a failed read.
const RETRY_DELAY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Why a slice could not be read.
#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error("cannot read ResourceSlice {slice}")]
    Call { slice: String, source: Box<kube::Error> },
    #[error("cannot read ResourceSlice {slice}: no answer within {}s", READ_TIMEOUT.as_secs())]
    Timeout { slice: String },
}

/// Where the summaries of all slices are sent. Each is `None` until it is known.
#[derive(Debug)]
pub struct Summaries {
    pub devices: watch::Sender<Option<Arc<DeviceSummary>>>,
    pub off: watch::Sender<Option<Arc<OffModes>>>,
}

/// Runs until the stream of events ends, which it never does.
pub async fn run(
    client: Client,
    Summaries { devices: now, off: off_now }: Summaries,
    ready: ControllerReadiness,
    metrics: Metrics,
) {
    let api: Api<SliceMetadata> = Api::all(client.clone());
    let config = watcher::Config::default().fields(&format!("spec.driver={DRIVER}"));
    let mut events = std::pin::pin!(watcher(api, config).default_backoff());
    let mut reads = FuturesUnordered::new();
    let (mut index, mut off) = (DeviceIndex::default(), OffIndex::default());
    let (mut listing, mut revision) = (true, 0);
    let (mut next_read, mut failures) = (Instant::now(), 0_u32);
    let failed = |why: String| {
        if now.borrow().is_none() {
            ready.set(ReadyCondition::Slices, Err(why));
        }
    };
    loop {
        tokio::select! {
            event = events.next() => match event {
                None => return,
                Some(Ok(Event::Init)) => {
                    listing = true;
                    index.relist();
                    off.relist();
                }
                Some(Ok(Event::InitApply(slice) | Event::Apply(slice))) => {
                    off.apply(&slice.metadata);
                    index.apply(&slice);
                }
                Some(Ok(Event::InitDone)) => {
                    listing = false;
                    index.listed();
                    off.listed();
                }
                Some(Ok(Event::Delete(slice))) => {
                    off.delete(&slice.metadata);
                    index.delete(&slice);
                }
                Some(Err(cause)) => {
                    tracing::debug!(%cause, "watch of ResourceSlices failed; it is retried");
                    failed(cause.to_string());
                }
            },
            () = sleep_until(next_read), if reads.len() < READS_MAX && index.has_next_read() => {
                next_read = Instant::now() + READ_PAUSE;
                reads.extend(index.next_read().map(|next| read(client.clone(), next)));
            }
            Some((read, found)) = reads.next() => match found {
                Ok(found) => {
                    failures = 0;
                    index.read(&read, found);
                }
                Err(error) => {
                    next_read = Instant::now() + retry_delay(failures);
                    failures += 1;
                    index.retry(&read);
                    let why = error_chain(&error);
                    tracing::debug!("{why}; it is retried");
                    failed(why);
                }
            },
        }
        if listing {
            continue;
        }
        metrics.slices(index.slices());
        if let Some(modes) = off.take_changes() {
            off_now.send_replace(Some(Arc::new(modes)));
        }
        let is_first = now.borrow().is_none();
        if if is_first { index.is_complete() } else { revision != index.revision } {
            revision = index.revision;
            let summary = Arc::new(index.summary());
            now.send_if_modified(|now| {
                let before = now.replace(summary);
                before != *now
            });
            ready.set(ReadyCondition::Slices, Ok(()));
        }
    }
}

/// The pause after a number of failed reads.
fn retry_delay(failures: u32) -> Duration {
    RETRY_DELAY.0.saturating_mul(1 << failures.min(10)).min(RETRY_DELAY.1)
}

/// Reads a slice. `None` if it is gone, or if its devices are not those of the API.
async fn read(client: Client, read: Read) -> (Read, Result<Option<Slice>, ReadError>) {
    let call = async {
        let request =
            Request::new(SliceMetadata::url_path(&(), None)).get(&read.slice, &GetParams::default());
        client.request(request.map_err(kube::Error::BuildRequest)?).await
    };
    let found = match timeout(READ_TIMEOUT, call).await {
        Ok(Ok(slice)) => Ok(Some(slice)),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(None),
        Ok(Err(kube::Error::SerdeError(cause))) => {
            tracing::warn!(slice = read.slice, %cause, "a ResourceSlice cannot be parsed; it is ignored");
            Ok(None)
        }
        Ok(Err(cause)) => Err(ReadError::Call { slice: read.slice.clone(), source: Box::new(cause) }),
        Err(_) => Err(ReadError::Timeout { slice: read.slice.clone() }),
    };
    (read, found)
}
