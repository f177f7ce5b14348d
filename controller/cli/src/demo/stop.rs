//! The end of the demo by a signal or by a closed output.
//!
//! SIGINT, SIGTERM, SIGHUP and a closed pipe abort the demo. While it waits for one of them, the first
//! one continues it, and the second one aborts it.

use super::report::Report;
use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::Cell;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Interval of checks whether the output is closed, while nothing is written.
const OUTPUT_INTERVAL: Duration = Duration::from_millis(200);

/// The signals so far.
pub(crate) struct Stop {
    first: CancellationToken,
    second: CancellationToken,
    waits: Cell<bool>,
}

impl Stop {
    /// Handles the signals from now on, on tasks of the runtime.
    pub(crate) fn install(report: &Report) -> Result<Self> {
        let (first, second) = (CancellationToken::new(), CancellationToken::new());
        for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
            let mut signals = signal(kind).context("cannot handle signals")?;
            let (first, second) = (first.clone(), second.clone());
            tokio::spawn(async move {
                while signals.recv().await.is_some() {
                    if first.is_cancelled() {
                        second.cancel();
                    }
                    first.cancel();
                }
            });
        }
        let (closed, stopped) = (report.closed().clone(), first.clone());
        tokio::spawn(async move {
            while !closed.is_cancelled() {
                tokio::select! {
                    () = closed.cancelled() => {}
                    () = tokio::time::sleep(OUTPUT_INTERVAL) => if output_is_closed() {
                        closed.cancel();
                    },
                }
            }
            stopped.cancel();
        });
        Ok(Self { first, second, waits: Cell::new(false) })
    }

    /// From now on the first signal does not abort.
    pub(crate) fn wait_for_stop(&self) {
        self.waits.set(true);
    }

    /// Completes at the first signal.
    pub(crate) async fn stopped(&self) {
        self.first.cancelled().await;
    }

    /// Completes when the demo must end at once.
    pub(crate) async fn aborted(&self) {
        self.first.cancelled().await;
        if self.waits.get() {
            self.second.cancelled().await;
        }
    }
}

/// Whether the reader of standard output has gone.
fn output_is_closed() -> bool {
    let stdout = std::io::stdout();
    let mut outputs = [PollFd::new(&stdout, PollFlags::empty())];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let polled = poll(&mut outputs, Some(&at_once)).is_ok_and(|ready| ready > 0);
    polled && outputs[0].revents().intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL)
}
