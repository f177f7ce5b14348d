//! The map of the GPUs with the claims that hold them.
//!
//! A separate process draws it from the simulator's state, so that it shows the actual state of the GPUs.

use anyhow::{Context, Result, ensure};
use divvy_api::Quantity;
use divvy_model::DeviceId;
use divvy_sim::Sim;
use divvy_sim::gpu_map::{GpuPart, Held, HeldPart, draw_gpus_with, process_names};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim, ResourceSlice};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

const MIB: u64 = 1 << 20;

/// Arguments of the drawing process.
#[derive(clap::Args)]
pub(crate) struct MapArguments {
    /// The simulator's directory.
    dir: PathBuf,
    /// The holders, as a JSON list.
    holders: String,
    #[arg(long)]
    colours: bool,
}

/// A claim and the device that it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Holder {
    pub(crate) claim: String,
    pub(crate) device: String,
    /// UUID of the GPU.
    pub(crate) gpu: String,
    pub(crate) mode: HeldMode,
    /// First memory slice of the MIG instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) start: Option<u32>,
    /// Memory of the part, in MiB; absent for a whole device.
    #[serde(rename = "memoryMiB", skip_serializing_if = "Option::is_none")]
    pub(crate) memory_mib: Option<u64>,
    /// Memory of the device, in MiB.
    #[serde(rename = "deviceMemoryMiB", skip_serializing_if = "Option::is_none")]
    pub(crate) device_memory_mib: Option<u64>,
    /// Per cent of the compute time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cores: Option<u64>,
    /// Per cent of the multiprocessors of an MPS client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) threads: Option<u64>,
    /// Slots of a time-slice, and of all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) slots: Option<(u64, u64)>,
}

/// The mode of a held device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum HeldMode {
    Whole,
    Share,
    Mig,
    TimeSlice,
    Mps,
}

impl HeldMode {
    const fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Share => "shares",
            Self::Mig => "MIG",
            Self::TimeSlice => "time-slice",
            Self::Mps => "MPS",
        }
    }
}

impl Holder {
    /// The part of the device that the claim holds, for people.
    fn part(&self) -> String {
        let percent = |percent: Option<u64>, of: &str| {
            percent.filter(|percent| *percent > 0).map(|percent| format!("{percent} %{of}"))
        };
        let parts = [
            self.memory_mib.map(memory),
            percent(self.cores, ""),
            percent(self.threads, " of the threads"),
            self.slots
                .map(|(slots, _)| if slots == 1 { "1 slot".to_owned() } else { format!("{slots} slots") }),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
    }

    /// The size of the part and of the whole in one unit, for a bar to scale.
    fn size(&self) -> Option<(u64, u64)> {
        self.slots.or_else(|| self.memory_mib.zip(self.device_memory_mib))
    }
}

/// An amount of memory: `10 GiB`, or `1500 MiB` if it is no whole number.
pub(crate) fn memory(mib: u64) -> String {
    if mib.is_multiple_of(1024) { format!("{} GiB", mib / 1024) } else { format!("{mib} MiB") }
}

/// The holders of allocated claims, from their allocations and the published devices.
pub(crate) fn holders<'a>(
    slices: &[ResourceSlice],
    claims: impl Iterator<Item = &'a ResourceClaim>,
) -> Vec<Holder> {
    let mut holders = Vec::new();
    for claim in claims {
        let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
        let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_ref());
        let name = claim.metadata.name.clone().unwrap_or_default();
        holders.extend(results.into_iter().flatten().filter_map(|result| holder(slices, &name, result)));
    }
    holders
}

fn holder(slices: &[ResourceSlice], claim: &str, result: &DeviceRequestAllocationResult) -> Option<Holder> {
    let published = |name: &str| {
        let mut devices = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
        devices.find(|device| device.name == name)
    };
    let id = DeviceId::try_from(&result.device.as_str().into()).ok()?;
    let gpu = DeviceId::Gpu(id.gpu()).to_string();
    let gpu = published(&gpu)?.attributes.as_ref()?.get("uuid")?.string.clone()?;
    let capacity = |name: &str| {
        let capacity = published(&result.device)?.capacity.as_ref()?.get(name)?;
        Quantity::try_from(&capacity.value).ok()?.as_bytes()
    };
    let consumed = |name: &str| {
        let part = result.consumed_capacity.as_ref()?.get(name)?;
        Quantity::try_from(part).ok()?.as_bytes()
    };
    let memory = consumed("memory").filter(|memory| Some(*memory) < capacity("memory"));
    let mut holder = Holder {
        claim: claim.to_owned(),
        device: result.device.clone(),
        gpu,
        mode: HeldMode::Whole,
        start: None,
        memory_mib: memory.map(|bytes| bytes / MIB),
        device_memory_mib: capacity("memory").map(|bytes| bytes / MIB),
        cores: None,
        threads: None,
        slots: None,
    };
    // A share with all the memory is shown as the whole device.
    let is_share = memory.is_some();
    match id {
        DeviceId::Mig { start, .. } => (holder.start, holder.mode) = (Some(start), HeldMode::Mig),
        DeviceId::Gpu(_) | DeviceId::Share(_) if is_share => holder.mode = HeldMode::Share,
        DeviceId::Gpu(_) | DeviceId::Share(_) => {}
        DeviceId::Timeslice(_) => {
            (holder.mode, holder.memory_mib) = (HeldMode::TimeSlice, None);
            holder.slots = consumed("slots").zip(capacity("slots"));
        }
        DeviceId::Mps(_) => {
            holder.mode = HeldMode::Mps;
            holder.memory_mib = consumed("memory").map(|bytes| bytes / MIB);
            holder.threads = consumed("threads");
        }
        DeviceId::Observer(_) => return None,
    }
    if is_share {
        holder.cores = consumed("cores");
    }
    Some(holder)
}

/// Draws the map in a separate process.
pub(crate) fn draw(dir: &Path, holders: &[Holder], colours: bool) -> Result<String> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("map").arg(dir).arg(serde_json::to_string(holders)?).stdin(Stdio::null());
    if colours {
        command.arg("--colours");
    }
    let out = command.output().context("cannot start the process that draws the map")?;
    ensure!(out.status.success(), "cannot draw the map: {}", String::from_utf8_lossy(&out.stderr));
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Draws the map, in the separate process.
pub(crate) fn run(arguments: &MapArguments) -> Result<ExitCode> {
    let state = Sim::open(&arguments.dir)?.read()?;
    let holders: Vec<Holder> = serde_json::from_str(&arguments.holders)?;
    let held = |part: GpuPart<'_>| {
        let start = part.gi.map(|gi| gi.placement.start);
        let is_held_by = |holder: &&Holder| holder.gpu == part.gpu.uuid && holder.start == start;
        held(&holders.iter().filter(is_held_by).collect::<Vec<_>>())
            .or_else(|| process_names(part).map(Held::Whole))
    };
    print!("{}", draw_gpus_with(&state, arguments.colours, &held));
    Ok(ExitCode::SUCCESS)
}

/// The holders of one device.
fn held(holders: &[&Holder]) -> Option<Held> {
    let first = holders.first()?;
    let sizes: Option<Vec<(u64, u64)>> = holders.iter().map(|holder| holder.size()).collect();
    let named = |holder: &&Holder| match holder.part() {
        part if part.is_empty() => holder.claim.clone(),
        part => format!("{} {part}", holder.claim),
    };
    let all = || holders.iter().map(named).collect::<Vec<_>>().join(", ");
    Some(match (first.mode, sizes) {
        // The map shows the profile of an instance already.
        (HeldMode::Mig, _) => Held::Whole(all()),
        (mode, Some(sizes)) => Held::Parts {
            mode: mode.name().to_owned(),
            of: sizes.first().map_or(1, |(_, of)| *of),
            parts: holders
                .iter()
                .zip(sizes)
                .map(|(holder, (size, _))| HeldPart { name: holder.claim.clone(), what: holder.part(), size })
                .collect(),
        },
        (mode, None) => Held::Whole(format!("{}: {}", mode.name(), all())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(claim: &str, memory_mib: u64) -> Holder {
        Holder {
            claim: claim.to_owned(),
            device: "gpu-0-share".to_owned(),
            gpu: "GPU-0".to_owned(),
            mode: HeldMode::Share,
            start: None,
            memory_mib: Some(memory_mib),
            device_memory_mib: Some(81_559),
            cores: Some(30),
            threads: None,
            slots: None,
        }
    }

    #[test]
    fn shares_are_parts_of_the_memory_of_the_gpu() {
        let (one, two) = (share("one", 10_240), share("two", 1500));
        let part = |name: &str, what: &str, size| HeldPart { name: name.into(), what: what.into(), size };
        let parts = vec![part("one", "10 GiB 30 %", 10_240), part("two", "1500 MiB 30 %", 1500)];
        let expected = Held::Parts { mode: "shares".to_owned(), parts, of: 81_559 };
        assert_eq!(held(&[&one, &two]), Some(expected));
    }

    #[test]
    fn a_whole_gpu_has_one_label() {
        let whole = Holder { mode: HeldMode::Whole, memory_mib: None, cores: None, ..share("one", 0) };
        assert_eq!(held(&[&whole]), Some(Held::Whole("whole: one".to_owned())));
        assert_eq!(held(&[]), None);
    }
}
