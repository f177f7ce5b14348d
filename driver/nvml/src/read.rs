//! Reads the [`Description`] and the [`State`] of a GPU.

use crate::code::Code;
use crate::error::NvmlError;
use crate::job::Worker;
use crate::mig::MAX_PROFILES;
use crate::names;
use crate::raw::{Device, Remote};
use crate::types::{Description, Fabric, Links, RawMig, State};
use divvy_model::inventory::{MigMode, MigProfile, MigToggle};
use divvy_model::names as model_names;
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

/// Whether the GPU or its driver has no MIG.
fn is_unsupported(error: &NvmlError) -> bool {
    matches!(error, NvmlError::Call { code: Code::NotSupported | Code::FunctionNotFound, .. })
}

impl Worker {
    pub(crate) fn state(&mut self) -> Result<State, NvmlError> {
        let device = self.device()?;
        let minor = self.call("nvmlDeviceGetMinorNumber", |nvml| nvml.minor(device))?;
        Ok(State { minor, mig: self.mig()? })
    }

    /// The MIG state. A refused query of it is no error of the GPU, which can be used as a whole.
    fn mig(&mut self) -> Result<RawMig, NvmlError> {
        let mode = match self.mig_mode() {
            Ok(mode) => mode,
            Err(error) if is_unsupported(&error) => return Ok(RawMig::Unsupported),
            Err(error) => return self.unreadable(None, error),
        };
        match self.description()?.profiles.as_ref().map(Vec::is_empty) {
            Ok(true) => return Ok(RawMig::Unsupported),
            Ok(false) => {}
            Err(error) => return self.unreadable(Some(mode), error.clone()),
        }
        if mode == MigMode::Off {
            return Ok(RawMig::Supported { mode, instances: Vec::new() });
        }
        match self.instances_of(None) {
            Ok(instances) => Ok(RawMig::Supported { mode, instances }),
            Err(error) => self.unreadable(Some(mode), error),
        }
    }

    /// Only an error that NVML returned about this query. A lost or stuck GPU stays an error.
    fn unreadable(&mut self, mode: Option<MigMode>, cause: NvmlError) -> Result<RawMig, NvmlError> {
        let NvmlError::Call { code, .. } = &cause else { return Err(cause) };
        if code.is_stale_handle() {
            self.device = None;
        }
        Ok(RawMig::Unreadable { mode, cause })
    }

    /// Reads the description once. The links are read again until MIG is off and they can be read,
    /// and the profiles until they can be read.
    pub(crate) fn description(&mut self) -> Result<Arc<Description>, NvmlError> {
        let known = match &self.description {
            Some(known) if known.links.is_some() && known.profiles.is_ok() => return Ok(Arc::clone(known)),
            Some(known) => Arc::clone(known),
            None => Arc::new(self.describe()?),
        };
        let profiles = match &known.profiles {
            Ok(profiles) => Ok(profiles.clone()),
            Err(_) => self.mig_profiles(known.memory_bytes)?,
        };
        let links = match (self.mig_mode(), &known.links) {
            (Ok(MigMode::On), _) => None,
            (_, Some(links)) => Some(links.clone()),
            (_, None) => Some(self.links()?),
        };
        let same = links == known.links && profiles == known.profiles;
        let known = if same { known } else { Arc::new(Description { links, profiles, ..(*known).clone() }) };
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
        let profiles = self.mig_profiles(memory_bytes)?;
        let architecture = architecture.unwrap_or(u32::MAX);
        Ok(Description {
            product,
            brand: model_names::brand(brand.unwrap_or(0)).to_owned(),
            architecture: model_names::architecture(architecture).to_owned(),
            compute_capability,
            memory_bytes,
            addressing_mode: addressing.and_then(model_names::addressing_mode).map(str::to_owned),
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

    /// The profiles, or the error that NVML returned for them. Other errors concern the whole GPU.
    fn mig_profiles(&mut self, memory_bytes: u64) -> Result<Result<Vec<MigProfile>, NvmlError>, NvmlError> {
        let device = self.device()?;
        match self.mig_mode().and_then(|_| self.profiles(device, memory_bytes)) {
            Ok(profiles) => Ok(Ok(profiles)),
            Err(error) if is_unsupported(&error) => Ok(Ok(Vec::new())),
            Err(error @ NvmlError::Call { .. }) => Ok(Err(error)),
            Err(error) => Err(error),
        }
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
            let mut placements = match placements {
                Err(error) if is_unsupported(&error) => Vec::new(),
                placements => placements?,
            };
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
