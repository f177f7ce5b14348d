//! Reads the [`Description`] and the [`State`] of a GPU.

use crate::code::Code;
use crate::error::NvmlError;
use crate::job::Worker;
use crate::mig::MAX_PROFILES;
use crate::names;
use crate::raw::{Device, Remote};
use crate::types::{Description, Fabric, Links, RawMig, State};
use divvy_model::inventory::{MigMode, MigProfile, MigToggle};
use divvy_model::{HealthReading, RecoveryAction};
use std::sync::Arc;

/// Turns an NVML error into `None`, for properties that not every GPU has.
fn none_if_unsupported<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(NvmlError::Call { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Turns an error of a property that the GPU or its driver lacks into `None`. Errors that say that the
/// GPU has failed stay errors.
fn none_if_absent<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    use Code::{GpuNotFound, IrqIssue, NotFound, ResetRequired, Unknown};
    match &answer {
        Err(NvmlError::Call {
            code: ResetRequired | GpuNotFound | NotFound | IrqIssue | Unknown, ..
        }) => answer.map(Some),
        _ => none_if_unsupported(answer),
    }
}

impl Worker {
    pub(crate) fn state(&mut self) -> Result<State, NvmlError> {
        let device = self.device()?;
        let minor = self.call("nvmlDeviceGetMinorNumber", |nvml| nvml.minor(device))?;
        let mig = match self.mig_mode() {
            Ok(_) if self.description()?.profiles.is_empty() => RawMig::Unsupported,
            Ok(MigMode::Off) => RawMig::Supported { mode: MigMode::Off, instances: Vec::new() },
            Ok(MigMode::On) => RawMig::Supported { mode: MigMode::On, instances: self.instances_of(None)? },
            Err(NvmlError::Call { code: Code::NotSupported | Code::FunctionNotFound, .. }) => {
                RawMig::Unsupported
            }
            Err(error) => return Err(error),
        };
        Ok(State { minor, mig })
    }

    /// Reads the description once. The links are read again until MIG is off and they can be read.
    pub(crate) fn description(&mut self) -> Result<Arc<Description>, NvmlError> {
        let known = match &self.description {
            Some(known) if known.links.is_some() => return Ok(Arc::clone(known)),
            Some(known) => Arc::clone(known),
            None => Arc::new(self.describe()?),
        };
        let links = match self.mig_mode() {
            Ok(MigMode::On) => None,
            _ => Some(self.links()?),
        };
        let known =
            if links == known.links { known } else { Arc::new(Description { links, ..(*known).clone() }) };
        self.description = Some(Arc::clone(&known));
        Ok(known)
    }

    fn describe(&mut self) -> Result<Description, NvmlError> {
        let device = self.device()?;
        let product = self.call("nvmlDeviceGetName", |nvml| nvml.name(device))?;
        let bus_id = self.call("nvmlDeviceGetPciInfo_v3", |nvml| nvml.bus_id(device))?;
        let compute_capability =
            self.call("nvmlDeviceGetCudaComputeCapability", |nvml| nvml.compute_capability(device))?;
        let brand = none_if_unsupported(self.call("nvmlDeviceGetBrand", |nvml| nvml.brand(device)))?;
        let architecture =
            none_if_unsupported(self.call("nvmlDeviceGetArchitecture", |nvml| nvml.architecture(device)))?;
        let memory =
            none_if_unsupported(self.call("nvmlDeviceGetMemoryInfo_v2", |nvml| nvml.memory_total(device)))?;
        let addressing = none_if_unsupported(
            self.call("nvmlDeviceGetAddressingMode", |nvml| nvml.addressing_mode(device)),
        )?;
        let memory_bytes = memory.unwrap_or(0);
        let profiles = match self.mig_mode() {
            Err(NvmlError::Call { .. }) => Vec::new(),
            Err(error) => return Err(error),
            Ok(_) => self.profiles(device, memory_bytes)?,
        };
        let architecture = architecture.unwrap_or(u32::MAX);
        Ok(Description {
            product,
            brand: names::brand(brand.unwrap_or(0)).to_owned(),
            architecture: names::architecture(architecture).to_owned(),
            compute_capability,
            memory_bytes,
            addressing_mode: addressing.and_then(names::addressing_mode).map(str::to_owned),
            pci_bus_id: names::bus_id(&bus_id),
            toggle: if architecture == u32::MAX || architecture < names::HOPPER {
                MigToggle::NeedsReset
            } else {
                MigToggle::Live
            },
            profiles,
            links: None,
        })
    }

    fn profiles(&mut self, device: Device, memory_bytes: u64) -> Result<Vec<MigProfile>, NvmlError> {
        let mut profiles = Vec::new();
        for index in 0..MAX_PROFILES {
            let info = match self
                .call("nvmlDeviceGetGpuInstanceProfileInfo", |nvml| nvml.gi_profile(device, index))
            {
                Ok(info) => info,
                Err(NvmlError::Call { code: Code::NotSupported, .. }) => continue,
                // The end of the list, or a GPU driver without this call.
                Err(NvmlError::Call { code: Code::InvalidArgument | Code::FunctionNotFound, .. }) => break,
                Err(error) => return Err(error),
            };
            let placements = self
                .call("nvmlDeviceGetGpuInstancePossiblePlacements", |nvml| nvml.placements(device, info.id));
            let mut placements = none_if_unsupported(placements)?.unwrap_or_default();
            placements.sort_unstable();
            profiles.push(MigProfile {
                id: info.id,
                index,
                name: names::profile(&info.name, index, info.slices, info.memory_mib, memory_bytes),
                memory_mib: info.memory_mib,
                multiprocessors: info.multiprocessors,
                copy_engines: info.copy_engines,
                decoders: info.decoders,
                encoders: info.encoders,
                jpeg_engines: info.jpeg_engines,
                ofa_engines: info.ofa_engines,
                max_instances: info.instances,
                placements,
            });
        }
        profiles.sort_by_key(|profile| profile.id);
        Ok(profiles)
    }

    /// The health of the GPU. The first call reaches the kernel driver on every GPU, so it fails on a
    /// GPU that is gone.
    pub(crate) fn health(&mut self) -> Result<HealthReading, NvmlError> {
        let device = self.device()?;
        none_if_absent(self.call("nvmlDeviceGetMemoryInfo_v2", |nvml| nvml.memory_total(device)))?;
        let action = self.call("nvmlDeviceGetFieldValues", |nvml| nvml.recovery_action(device));
        let action = none_if_absent(action)?;
        let rows = self.call("nvmlDeviceGetRemappedRows", |nvml| nvml.remapped_rows(device));
        let rows = none_if_absent(rows)?;
        let uncorrected = self.call("nvmlDeviceGetTotalEccErrors", |nvml| nvml.uncorrected_ecc(device));
        let uncorrected = none_if_absent(uncorrected)?;
        let energy = self.call("nvmlDeviceGetTotalEnergyConsumption", |nvml| nvml.energy_mj(device));
        Ok(HealthReading {
            recovery_action: action.map(RecoveryAction::from),
            remap_pending: rows.map(|(pending, _)| pending),
            remap_failed: rows.map(|(_, failed)| failed),
            uncorrected_ecc: uncorrected,
            energy_mj: none_if_absent(energy)?,
        })
    }

    fn links(&mut self) -> Result<Links, NvmlError> {
        let device = self.device()?;
        let mut links = Links::default();
        let mut switched = false;
        for link in 0..MAX_LINKS {
            match none_if_unsupported(
                self.call("nvmlDeviceGetNvLinkState", |nvml| nvml.link_is_active(device, link)),
            )? {
                Some(true) => {}
                Some(false) => continue,
                None => break,
            }
            match none_if_unsupported(
                self.call("nvmlDeviceGetNvLinkRemotePciInfo_v2", |nvml| nvml.link_remote(device, link)),
            )? {
                Some(Remote::Gpu(bus_id)) => links.gpus.push(names::bus_id(&bus_id)),
                Some(Remote::Switch) => switched = true,
                Some(Remote::Other) | None => {}
            }
        }
        links.gpus.sort_unstable();
        links.gpus.dedup();
        if switched {
            let fabric =
                none_if_unsupported(self.call("nvmlDeviceGetGpuFabricInfo", |nvml| nvml.fabric(device)))?;
            links.switch =
                Some(fabric.map(|(cluster, clique)| Fabric { cluster, clique }).unwrap_or_default());
        }
        Ok(links)
    }
}

/// Bound for a faulty library. A real one returns an error after its last link.
const MAX_LINKS: u32 = 64;
