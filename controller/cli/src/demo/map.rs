//! The map of the GPUs with the claims that hold them.
//!
//! A separate process draws it from the simulator's state, so that it shows the actual state of the GPUs.

use anyhow::{Context, Result, ensure};
use divvy_api::Quantity;
use divvy_model::DeviceId;
use divvy_sim::Sim;
use divvy_sim::gpu_map::{GpuPart, draw_gpus_with, process_names};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Arguments of the drawing process.
#[derive(clap::Args)]
pub(crate) struct MapArguments {
    /// The simulator's directory.
    dir: PathBuf,
    /// `<GPU UUID>[@<start of the instance>]=<mode>:<label>`; several claims may hold the same device
    #[arg(long)]
    holder: Vec<Holder>,
    #[arg(long)]
    colours: bool,
}

/// A claim and the GPU or MIG instance that it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    /// UUID of the GPU.
    uuid: String,
    /// First memory slice of the MIG instance.
    start: Option<u32>,
    /// Display name of the mode.
    mode: String,
    /// Name of the claim, and its part of a shared device.
    claim: String,
}

impl std::str::FromStr for Holder {
    type Err = &'static str;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const FORM: &str = "a holder is <GPU UUID>[@<start>]=<mode>:<claim>";
        let (device, held) = text.split_once('=').ok_or(FORM)?;
        let (mode, claim) = held.split_once(':').ok_or(FORM)?;
        let (uuid, start) = match device.split_once('@') {
            Some((uuid, start)) => (uuid, Some(start.parse().map_err(|_| FORM)?)),
            None => (device, None),
        };
        Ok(Self { uuid: uuid.to_owned(), start, mode: mode.to_owned(), claim: claim.to_owned() })
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { uuid, start, mode, claim } = self;
        match start {
            Some(start) => write!(out, "{uuid}@{start}={mode}:{claim}"),
            None => write!(out, "{uuid}={mode}:{claim}"),
        }
    }
}

/// The holders of allocated claims, from their allocations and the published devices.
pub(crate) fn holders(slices: &[ResourceSlice], claims: &[ResourceClaim]) -> Vec<Holder> {
    let published = |name: &str| {
        let mut devices = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
        devices.find(|device| device.name == name)
    };
    let uuid_of = |gpu: &str| published(gpu)?.attributes.as_ref()?.get("uuid")?.string.clone();
    let memory_of = |device: &str| {
        let memory = published(device)?.capacity.as_ref()?.get("memory")?;
        Quantity::try_from(&memory.value).ok()
    };
    let mut holders = Vec::new();
    for claim in claims {
        let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
        let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_ref());
        for result in results.into_iter().flatten() {
            let Ok(id) = DeviceId::try_from(&result.device.as_str().into()) else { continue };
            let Some(uuid) = uuid_of(&DeviceId::Gpu(id.gpu()).to_string()) else { continue };
            let name = claim.metadata.name.clone().unwrap_or_default();
            let part = |capacity: &str| {
                let part = result.consumed_capacity.as_ref().and_then(|all| all.get(capacity));
                part.map_or("?", |quantity| &quantity.0)
            };
            let memory = result.consumed_capacity.as_ref().and_then(|all| all.get("memory"));
            let memory = memory.and_then(|memory| Quantity::try_from(memory).ok());
            // A share with all the memory is shown as the whole device.
            let share = memory.is_some_and(|memory| Some(memory) < memory_of(&result.device));
            let (start, mode, claim) = match &id {
                DeviceId::Mig { start, .. } if share => {
                    (Some(*start), "MIG", format!("{name} {}", part("memory")))
                }
                DeviceId::Gpu(_) | DeviceId::Share(_) if share => {
                    (None, "share", format!("{name} {}", part("memory")))
                }
                DeviceId::Mig { start, .. } => (Some(*start), "MIG", name),
                DeviceId::Gpu(_) | DeviceId::Share(_) => (None, "whole", name),
                DeviceId::Timeslice(_) => (None, "time-slice", format!("{name} {}", part("slots"))),
                DeviceId::Mps(_) => (None, "MPS", format!("{name} {} % {}", part("threads"), part("memory"))),
                DeviceId::Observer(_) => continue,
            };
            holders.push(Holder { uuid, start, mode: mode.to_owned(), claim });
        }
    }
    holders
}

/// Draws the map in a separate process.
pub(crate) fn draw(dir: &Path, holders: &[Holder], colours: bool) -> Result<String> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("map").arg(dir);
    if colours {
        command.arg("--colours");
    }
    for holder in holders {
        command.arg("--holder").arg(holder.to_string());
    }
    let out = command.output().context("cannot start the process that draws the map")?;
    ensure!(out.status.success(), "cannot draw the map: {}", String::from_utf8_lossy(&out.stderr));
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Draws the map, in the separate process.
pub(crate) fn run(arguments: &MapArguments) -> Result<ExitCode> {
    let state = Sim::open(&arguments.dir)?.read()?;
    let name = |part: GpuPart<'_>| {
        let start = part.gi.map(|gi| gi.placement.start);
        let is_held_by = |holder: &&Holder| holder.uuid == part.gpu.uuid && holder.start == start;
        let held: Vec<_> = arguments.holder.iter().filter(is_held_by).collect();
        let claims = held.iter().map(|holder| holder.claim.as_str()).collect::<Vec<_>>().join(", ");
        match held.first() {
            None => process_names(part),
            // The map shows the profile of an instance already.
            Some(_) if part.gi.is_some() => Some(claims),
            Some(Holder { mode, .. }) => Some(format!("{mode}: {claims}")),
        }
    };
    print!("{}", draw_gpus_with(&state, arguments.colours, &name));
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_round_trip_as_text() {
        for text in ["GPU-1=MPS:chat 30 %", "GPU-1@3=MIG:slice"] {
            assert_eq!(text.parse::<Holder>().expect("parses").to_string(), text);
        }
        for text in ["GPU-1", "GPU-1=slice", "GPU-1@x=MIG:slice"] {
            assert!(text.parse::<Holder>().is_err(), "{text}");
        }
    }
}
