//! Creating and destroying instances, with the real program's words for how it went.

use super::Options;
use crate::smi::Selected;
use crate::smi::library::{Nvml, Smi, SmiError};
use crate::smi::structures::{Handle, Placement};

/// Whether the name is of a compute instance with all slices of its GPU instance.
pub(super) fn is_whole(name: &str) -> bool {
    !name.split('.').next().is_some_and(|first| first.ends_with('c'))
}

/// `19`, `1g.10gb` or `MIG 1g.10gb`, each perhaps with `:start`.
pub(super) fn create_gis(nvml: &Nvml, gpu: &Selected, wanted: &[String], whole: bool) -> Smi<()> {
    let profiles = nvml.gi_profiles(gpu.handle)?;
    for want in wanted {
        let (text, start) = match want.split_once(':') {
            Some((text, start)) => (text, Some(start)),
            None => (want.as_str(), None),
        };
        let plain = text.strip_prefix("MIG ").unwrap_or(text);
        let is = |name: &str| name == plain || name.strip_prefix("MIG ") == Some(plain);
        let profile = profiles
            .iter()
            .find(|profile| plain.parse() == Ok(profile.id) || is(&profile.name()))
            .ok_or_else(|| {
                SmiError::Usage(format!(
                    "Unable to find a GPU instance profile {want:?} on GPU {:>2}.",
                    gpu.index
                ))
            })?;
        let place = match start {
            None => None,
            Some(start) => {
                let start = start
                    .parse()
                    .map_err(|_| SmiError::Usage(format!("Unable to parse placement {want:?}.")))?;
                let size = nvml.placements(gpu.handle, profile.id)?.first().map_or(0, |place| place.size);
                Some(Placement { start, size })
            }
        };
        let (gi, info) = nvml.create_gi(gpu.handle, profile.id, place).map_err(|error| {
            println!(
                "Unable to create a GPU instance on GPU {:>2} using profile {}: {error}",
                gpu.index, profile.id
            );
            failed("Failed to create GPU instances", error)
        })?;
        println!(
            "Successfully created GPU instance ID {:>2} on GPU {:>2} using profile {} (ID {:>2})",
            info.id,
            gpu.index,
            profile.name(),
            profile.id
        );
        if whole {
            create_ci(nvml, gpu, gi, info.id, None)?;
        }
    }
    Ok(())
}

/// Without a name, of all slices.
fn create_ci(nvml: &Nvml, gpu: &Selected, gi: Handle, gi_id: u32, wanted: Option<&str>) -> Smi<()> {
    let profiles = nvml.ci_profiles(gi)?;
    let found = match wanted.map(|text| text.strip_prefix("MIG ").unwrap_or(text)) {
        None => profiles.iter().find(|profile| is_whole(&profile.name())),
        Some(text) => profiles.iter().find(|profile| {
            text.parse() == Ok(profile.id) || profile.name().strip_prefix("MIG ") == Some(text)
        }),
    };
    let unknown = || {
        SmiError::Usage(format!(
            "Unable to find compute instance profile {wanted:?} in GPU instance {gi_id}."
        ))
    };
    let profile = found.ok_or_else(unknown)?;
    let info = nvml.create_ci(gi, profile.id).map_err(|error| {
        println!(
            "Unable to create a compute instance on GPU {:>2} GPU instance ID {gi_id:>2} using profile {}: {error}",
            gpu.index, profile.id
        );
        failed("Failed to create compute instances", error)
    })?;
    println!(
        "Successfully created compute instance ID {:>2} on GPU {:>2} GPU instance ID {gi_id:>2} using profile {} (ID {:>2})",
        info.id,
        gpu.index,
        profile.name(),
        profile.id
    );
    Ok(())
}

pub(super) fn create_cis(nvml: &Nvml, gpu: &Selected, wanted: &[String], options: &Options) -> Smi<()> {
    for (gi, info) in nvml.gis(gpu.handle)?.into_iter().filter(|(_, gi)| options.wants_gi(gi.id)) {
        if wanted.is_empty() {
            create_ci(nvml, gpu, gi, info.id, None)?;
        }
        for want in wanted {
            create_ci(nvml, gpu, gi, info.id, Some(want))?;
        }
    }
    Ok(())
}

pub(super) fn destroy_gis(nvml: &Nvml, gpus: &[&Selected], options: &Options) -> Smi<()> {
    let mut any = false;
    for gpu in gpus {
        for (gi, info) in nvml.gis(gpu.handle)?.into_iter().filter(|(_, gi)| options.wants_gi(gi.id)) {
            any = true;
            nvml.destroy_gi(gi).map_err(|error| {
                println!(
                    "Unable to destroy GPU instance ID {:>2} from GPU {:>2}: {error}",
                    info.id, gpu.index
                );
                failed("Failed to destroy GPU instances", error)
            })?;
            println!("Successfully destroyed GPU instance ID {:>2} from GPU {:>2}", info.id, gpu.index);
        }
    }
    if any { Ok(()) } else { Err(SmiError::Failed { what: "No GPU instances found".to_owned(), code: 6 }) }
}

pub(super) fn destroy_cis(nvml: &Nvml, gpus: &[&Selected], options: &Options) -> Smi<()> {
    let mut any = false;
    for gpu in gpus {
        for (gi, info) in nvml.gis(gpu.handle)?.into_iter().filter(|(_, gi)| options.wants_gi(gi.id)) {
            for (ci, part) in nvml.cis(gi)?.into_iter().filter(|(_, ci)| options.wants_ci(ci.id)) {
                any = true;
                let place = format!("from GPU {:>2} GPU instance ID {:>2}", gpu.index, info.id);
                nvml.destroy_ci(ci).map_err(|error| {
                    println!("Unable to destroy compute instance ID {:>2} {place}: {error}", part.id);
                    failed("Failed to destroy compute instances", error)
                })?;
                println!("Successfully destroyed compute instance ID {:>2} {place}", part.id);
            }
        }
    }
    if any {
        Ok(())
    } else {
        Err(SmiError::Failed { what: "No compute instances found".to_owned(), code: 6 })
    }
}

fn failed(what: &str, error: SmiError) -> SmiError {
    match error {
        SmiError::Nvml(code) => SmiError::Failed { what: what.to_owned(), code },
        other => other,
    }
}
