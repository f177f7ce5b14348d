//! Owns the tasks of a program: they start in order and stop in reverse order. A task that ends
//! by itself stops the program. All state is persistent or external, so a restart recovers.

use futures::future::BoxFuture;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The running tasks, in the order of their start.
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
    /// Work to do after everything that was started later has stopped.
    Then(BoxFuture<'static, ()>),
}

impl Stages {
    /// Starts a task that runs until its token is cancelled.
    pub fn task(
        &mut self,
        name: &'static str,
        part: impl FnOnce(CancellationToken) -> BoxFuture<'static, anyhow::Result<()>>,
    ) {
        let stop = CancellationToken::new();
        let work = part(stop.clone());
        // The drop guard also covers a panic.
        let (failed, stopped) = (self.failed.clone().drop_guard(), stop.clone());
        let task = tokio::spawn(async move {
            let _failed = failed;
            match work.await {
                Err(error) => tracing::error!(task = name, "{error:#}"),
                Ok(()) if !stopped.is_cancelled() => tracing::error!(task = name, "task ended unexpectedly"),
                Ok(()) => {}
            }
        });
        self.running.push(Stage::Task { name, stop, task });
    }

    /// Starts a task that may be dropped at any await point.
    pub fn droppable(&mut self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        self.task(name, |stop| {
            Box::pin(async move {
                stop.run_until_cancelled(work).await;
                Ok(())
            })
        });
    }

    /// Adds work to do after everything that was started later has stopped.
    pub fn then(&mut self, end: impl Future<Output = ()> + Send + 'static) {
        self.running.push(Stage::Then(Box::pin(end)));
    }

    /// Cancelled when a task ends that should run until it is stopped.
    pub fn failed(&self) -> CancellationToken {
        self.failed.clone()
    }

    /// The number of started stages, for [`Self::stop_to`].
    pub fn started(&self) -> usize {
        self.running.len()
    }

    /// Stops everything in reverse order.
    pub async fn stop(&mut self) {
        self.stop_to(0).await;
    }

    /// Stops in reverse order until only the first `started` stages remain.
    pub async fn stop_to(&mut self, started: usize) {
        while self.running.len() > started
            && let Some(stage) = self.running.pop()
        {
            match stage {
                Stage::Task { name, stop, task } => {
                    stop.cancel();
                    if let Err(cause) = task.await {
                        tracing::error!(task = name, %cause, "task panicked or was aborted");
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
    async fn tasks_stop_in_reverse_order_and_early_exit_is_detected() {
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
        assert_eq!(log.lock().unwrap().len(), 2, "earlier stages must keep running");
        stages.stop().await;
        let order = log.lock().unwrap().clone();
        assert_eq!(order, [("second", "task"), ("second", "then"), ("first", "task"), ("first", "then")]);
    }
}
