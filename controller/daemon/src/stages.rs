//! Every task has an owner: parts start in an order and stop in the reverse.
//! A part that ends by itself ends the program: state is elsewhere, and a fresh
//! start is the best repair.

use futures::future::BoxFuture;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// What runs, in the order it was started.
#[derive(Default)]
pub struct Stages {
    running: Vec<Stage>,
    failed: CancellationToken,
}

enum Stage {
    Task {
        name: &'static str,
        stop: CancellationToken,
        task: JoinHandle<()>,
    },
    /// Something to do when everything started later has stopped.
    Then(BoxFuture<'static, ()>),
}

impl Stages {
    /// Runs a part of the program until its token is cancelled.
    pub fn task(
        &mut self,
        name: &'static str,
        part: impl FnOnce(CancellationToken) -> BoxFuture<'static, anyhow::Result<()>>,
    ) {
        let stop = CancellationToken::new();
        let work = part(stop.clone());
        // A guard, because a panic must be noticed as well.
        let (failed, stopped) = (self.failed.clone().drop_guard(), stop.clone());
        let task = tokio::spawn(async move {
            let _failed = failed;
            match work.await {
                Err(error) => tracing::error!(part = name, "{error:#}"),
                Ok(()) if !stopped.is_cancelled() => tracing::error!(part = name, "ended"),
                Ok(()) => {}
            }
        });
        self.running.push(Stage::Task { name, stop, task });
    }

    /// A part that can be dropped at any point.
    pub fn droppable(&mut self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        self.task(name, |stop| {
            Box::pin(async move {
                stop.run_until_cancelled(work).await;
                Ok(())
            })
        });
    }

    /// Something to wait for when everything started later has stopped.
    pub fn then(&mut self, end: impl Future<Output = ()> + Send + 'static) {
        self.running.push(Stage::Then(Box::pin(end)));
    }

    /// Cancelled when a task ends that should run for ever.
    pub fn failed(&self) -> CancellationToken {
        self.failed.clone()
    }

    /// How far the start has come: what is started from here on is what
    /// [`Self::stop_to`] stops.
    pub fn started(&self) -> usize {
        self.running.len()
    }

    /// Stops everything, last started first.
    pub async fn stop(&mut self) {
        self.stop_to(0).await;
    }

    /// Stops what was started since, last started first.
    pub async fn stop_to(&mut self, started: usize) {
        while self.running.len() > started
            && let Some(stage) = self.running.pop()
        {
            match stage {
                Stage::Task { name, stop, task } => {
                    stop.cancel();
                    if let Err(cause) = task.await {
                        tracing::error!(part = name, %cause, "ended badly");
                    }
                }
                Stage::Then(end) => end.await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[tokio::test]
    async fn parts_stop_in_reverse_order_and_an_early_end_is_noticed() {
        let (mut stages, log) = (Stages::default(), Arc::new(Mutex::new(Vec::new())));
        for name in ["first", "second"] {
            let (part, end) = (log.clone(), log.clone());
            stages.then(async move { end.lock().unwrap().push((name, "then")) });
            stages.task(name, |stop| {
                Box::pin(async move {
                    stop.cancelled().await;
                    part.lock().unwrap().push((name, "task"));
                    Ok(())
                })
            });
        }
        assert!(!stages.failed().is_cancelled());
        stages.droppable("early", async {});
        stages.failed().cancelled().await;
        stages.stop_to(2).await;
        assert_eq!(log.lock().unwrap().len(), 2, "what was started before goes on");
        stages.stop().await;
        let said = log.lock().unwrap().clone();
        assert_eq!(said, [("second", "task"), ("second", "then"), ("first", "task"), ("first", "then")]);
    }
}
