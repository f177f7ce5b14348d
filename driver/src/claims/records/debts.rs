//! Debts: undo steps of released claims that could not be done, one file per GPU and claim.
//!
//! `<state>/debts/<GPU UUID>/<claim UID>.json`. A debt is written before its record is removed, and
//! removed after the hardware was restored or reset. Writes happen under the GPU's lock; only a
//! quarantine writes without it, and its file name is not used by another claim.

use super::record::{DeviceRecord, InstanceIds};
use crate::claims::step::Undo;
use crate::gpu::epoch::Epoch;
use crate::gpu::part::{InstanceKey, Part};
use divvy_api::{ClaimRef, GpuUuid};
use divvy_model::HealthReading;
use std::fmt;

/// The remaining state of a released claim on one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Debt {
    pub claim: ClaimRef,
    pub gpu: GpuUuid,
    /// The debt is void in another epoch.
    pub epoch: Epoch,
    /// Parts that containers of the claim may still use. Only a quarantined record has them.
    pub held: Vec<Part>,
    /// Undo steps in the order of the steps; they run in reverse.
    pub undo: Vec<Undo>,
    /// Ids of the instances that `undo` destroys, where they are known. An instance with other ids
    /// is not the claim's.
    pub instances: Vec<(InstanceKey, InstanceIds)>,
    /// The last reading of the GPU's health. A later one may show that the GPU was reset.
    pub reading: Option<HealthReading>,
    /// Why the steps were not done.
    pub cause: String,
}

impl Debt {
    /// The debts of a claim, one for each GPU that has steps or held parts.
    pub(crate) fn of_claim(
        claim: &ClaimRef,
        devices: &[DeviceRecord],
        held: &[Part],
        undo: &[Undo],
        epoch: &Epoch,
        cause: &str,
    ) -> Vec<Self> {
        let mut debts: Vec<Self> = Vec::new();
        let mut of_gpu = |gpu: &GpuUuid, add: &dyn Fn(&mut Self)| {
            let known = debts.iter().position(|debt| debt.gpu == *gpu).unwrap_or_else(|| {
                debts.push(Self {
                    claim: claim.clone(),
                    gpu: gpu.clone(),
                    epoch: epoch.clone(),
                    held: Vec::new(),
                    undo: Vec::new(),
                    instances: Vec::new(),
                    reading: None,
                    cause: cause.to_owned(),
                });
                debts.len() - 1
            });
            add(&mut debts[known]);
        };
        for part in held {
            of_gpu(part.gpu(), &|debt| debt.held.push(part.clone()));
        }
        for step in undo {
            if let Some(gpu) = step.gpu() {
                of_gpu(gpu, &|debt| debt.undo.push(step.clone()));
            }
        }
        for debt in &mut debts {
            let own = devices.iter().filter_map(|device| match (&device.part, &device.instance) {
                (Part::Instance(key), Some(ids)) if key.gpu == debt.gpu => Some((key.clone(), ids.clone())),
                _ => None,
            });
            debt.instances =
                own.filter(|(key, _)| debt.parts().contains(&Part::Instance(key.clone()))).collect();
        }
        debts
    }

    /// The parts of the GPU that nothing else may use until the debt is settled.
    pub fn parts(&self) -> Vec<Part> {
        let by_undo = self.undo.iter().map(|undo| match undo {
            Undo::DestroyGpuInstance(key) | Undo::DestroyComputeInstances(key) => Part::Instance(key.clone()),
            Undo::StopMps { part } => part.clone(),
            Undo::ResetInterval { .. }
            | Undo::ResetComputeMode { .. }
            | Undo::RemovePages
            | Undo::RemoveCdi => Part::Whole { gpu: self.gpu.clone() },
        });
        let mut parts: Vec<Part> = self.held.iter().cloned().chain(by_undo).collect();
        parts.sort();
        parts.dedup();
        parts
    }

    /// Whether the debt destroys an instance of that profile at that start.
    pub fn has_instance(&self, profile_id: u32, start: u32) -> bool {
        self.parts().iter().any(|part| match part {
            Part::Instance(key) => (key.profile_id, key.placement.start) == (profile_id, start),
            Part::Whole { .. } => false,
        })
    }
}

impl fmt::Display for Debt {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = self.undo.iter().rev().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        match steps.is_empty() {
            true => write!(out, "containers may use it ({})", self.cause),
            false => write!(out, "{steps} ({})", self.cause),
        }
    }
}
