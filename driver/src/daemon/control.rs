//! Serves the control socket for `divvy node` ([`divvy_api::control`]).

use crate::claims::engine::Engine;
use crate::claims::records::RecordError;
use crate::gpu::Gpus;
use crate::kubelet::registration::SocketFile;
use divvy_api::control::{Answer, GpuHealth, LINE_MAX_BYTES, Request, SOCKET};
use divvy_api::text::error_chain;
use divvy_model::DeviceId;
use divvy_model::inventory::{Gpu, Presence};
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

/// Time for one request: closing NVML waits for running calls, at most 20 s.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Pause after a failed accept, so that the loop does not spin.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_secs(1);

/// The server of the socket.
pub struct Control {
    pub gpus: Gpus,
    pub engine: Engine,
}

impl Control {
    /// Serves one request at a time until `stop` is cancelled.
    ///
    /// # Errors
    /// The socket cannot be created.
    pub async fn run(self, run_dir: &Path, stop: CancellationToken) -> anyhow::Result<()> {
        std::fs::create_dir_all(run_dir)?;
        let (_file, listener) = SocketFile::listen(&run_dir.join(SOCKET))?;
        loop {
            let stream = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => stream,
                    // For example, too many open files. The daemon must not exit for it.
                    Err(cause) => {
                        tracing::warn!(%cause, "cannot accept a control connection");
                        tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                        continue;
                    }
                },
            };
            match tokio::time::timeout(REQUEST_TIMEOUT, self.serve(stream)).await {
                Ok(Ok(())) => {}
                Ok(Err(cause)) => tracing::debug!(%cause, "control connection failed"),
                Err(_) => tracing::warn!(within = ?REQUEST_TIMEOUT, "control request not answered in time"),
            }
        }
    }

    async fn serve(&self, mut stream: UnixStream) -> std::io::Result<()> {
        let (reader, mut writer) = stream.split();
        let mut line = String::new();
        BufReader::new(reader.take(LINE_MAX_BYTES)).read_line(&mut line).await?;
        let answer = match serde_json::from_str(&line) {
            Ok(request) => self.answer(request).await,
            Err(cause) => Answer::Refused(format!("not a request that this version knows: {cause}")),
        };
        let mut text = serde_json::to_vec(&answer)?;
        text.push(b'\n');
        writer.write_all(&text).await
    }

    async fn answer(&self, request: Request) -> Answer {
        let done = |result: Result<(), String>, text: String| match result {
            Ok(()) => {
                tracing::info!("{text}");
                Answer::Done(text)
            }
            Err(error) => Answer::Refused(error),
        };
        match request {
            Request::Health => match self.health() {
                Ok(health) => Answer::Health(health),
                Err(error) => Answer::Refused(error_chain(&error)),
            },
            Request::Release { gpu } => {
                let released = self.gpus.hand_over(&gpu).await.map_err(|error| error_chain(&error));
                done(
                    released,
                    format!("{gpu} is released: reset it, then run divvy node release {gpu} --take-back"),
                )
            }
            Request::TakeBack { gpu } => {
                let taken = self.gpus.take_back(&gpu).await.map_err(|error| error_chain(&error));
                done(taken, format!("{gpu} is used again"))
            }
            Request::Forget { gpu } => {
                let forgotten = self.gpus.forget(&gpu).await.map_err(|error| error_chain(&error));
                done(forgotten, format!("{gpu} is forgotten"))
            }
        }
    }

    fn health(&self) -> Result<Vec<GpuHealth>, RecordError> {
        let inventory = self.gpus.inventory().borrow().clone();
        let held = self.engine.held()?;
        let health = |gpu: &Gpu| {
            let on_gpu = |device: &divvy_api::DeviceName| {
                DeviceId::try_from(device).is_ok_and(|device| device.gpu() == gpu.number)
            };
            let holders = held.iter().filter(|claim| claim.devices.iter().any(on_gpu));
            GpuHealth {
                number: gpu.number.0,
                uuid: gpu.uuid.clone(),
                product: gpu.product.clone(),
                presence: match gpu.presence {
                    Presence::Present => "present",
                    Presence::Unread => "unread",
                    Presence::Missing => "missing",
                }
                .to_owned(),
                state: gpu.health().to_string(),
                conditions: gpu.conditions.iter().map(ToString::to_string).collect(),
                claims: holders
                    .map(|claim| format!("{}/{}", claim.claim.namespace, claim.claim.name))
                    .collect(),
            }
        };
        Ok(inventory.gpus.iter().map(health).collect())
    }
}
