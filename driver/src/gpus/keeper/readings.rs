//! Readings of GPUs: at most one at a time of each, and who waits for it.

use super::{Keeper, Nvml, Reading};
use crate::discover::Fresh;
use divvy_api::GpuUuid;
use divvy_nvml::{Event, Late, NvmlError};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Who waits for readings of one GPU.
#[derive(Default)]
pub(super) struct Waiting {
    /// For the reading that runs.
    pub(super) now: Vec<oneshot::Sender<()>>,
    /// For the one after it; absent when none is wanted.
    pub(super) next: Option<Vec<oneshot::Sender<()>>>,
    /// Told to the world when the reading that runs is in.
    pub(super) late: Vec<Late>,
}

impl Keeper {
    /// Reads a GPU, or once more after the reading that runs: that one may
    /// have passed what the caller wants to see.
    pub(super) fn start_reading(&mut self, gpu: GpuUuid, done: Option<oneshot::Sender<()>>) {
        let Nvml::Open { session, snapshot, .. } = &self.nvml else { return };
        if snapshot.gpus.iter().all(|known| known.uuid != gpu) {
            return;
        }
        if let Some(waiting) = self.reading.get_mut(&gpu) {
            waiting.next.get_or_insert_default().extend(done);
            return;
        }
        let waiting = Waiting { now: done.into_iter().collect(), ..Waiting::default() };
        self.reading.insert(gpu.clone(), waiting);
        self.doubts.reading_begins(&gpu, &*self.ours);
        let reading = session.gpu(&gpu).read();
        self.reads.spawn(async move { (gpu, reading.await) });
    }

    pub(super) fn read(&mut self, gpu: GpuUuid, reading: Reading) {
        let mut waiting = self.reading.remove(&gpu).unwrap_or_default();
        let told = reading.is_ok();
        self.set(&gpu, reading);
        if told && !waiting.now.is_empty() && self.doubts.gpus().any(|doubted| *doubted == gpu) {
            // Who waits wants to know whose the instances are.
            waiting.next.get_or_insert_default().append(&mut waiting.now);
        }
        for done in waiting.now {
            let _unheard = done.send(());
        }
        for late in waiting.late {
            let _unheard = self.shared.events.send(Event::Late(late));
        }
        if let Some(next) = waiting.next {
            self.start_reading(gpu.clone(), None);
            if let Some(waiting) = self.reading.get_mut(&gpu) {
                waiting.now = next;
            }
        }
    }

    /// Takes over what a GPU says of itself.
    pub(super) fn set(&mut self, gpu: &GpuUuid, reading: Reading) {
        let Nvml::Open { snapshot, .. } = &mut self.nvml else { return };
        let Some(known) = snapshot.gpus.iter_mut().find(|known| known.uuid == *gpu) else { return };
        // An answer that says nothing of the GPU does not replace one that does.
        if matches!(reading, Err(NvmlError::Busy { .. } | NvmlError::Closed { .. })) {
            return;
        }
        if let (Err(_), Ok((description, _))) = (&known.reading, &reading) {
            let place = self.sysfs.pci(&description.pci_bus_id);
            self.pci.insert(description.pci_bus_id.clone(), place);
            tracing::info!(%gpu, "GPU is readable again");
        }
        let same = match (&known.reading, &reading) {
            (Ok((was, before)), Ok((is, now))) => Arc::ptr_eq(was, is) && before.minor == now.minor,
            _ => false,
        };
        self.changed |= !same;
        known.reading = reading;
        self.publish(Fresh::Gpu(gpu));
    }

    pub(super) fn retry(&mut self) {
        let Nvml::Open { snapshot, .. } = &self.nvml else { return };
        let failed = snapshot.gpus.iter().filter(|gpu| gpu.reading.is_err()).map(|gpu| &gpu.uuid);
        for gpu in failed.chain(self.doubts.gpus()).cloned().collect::<BTreeSet<_>>() {
            self.start_reading(gpu, None);
        }
    }
}
