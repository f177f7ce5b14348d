//! The tables of `nvidia-smi mig`, drawn as the real program draws them.

use super::Options;
use super::change::is_whole;
use crate::smi::Selected;
use crate::smi::library::{Nvml, Smi, SmiError, text_of};
use crate::smi::structures::Handle;

fn rule(width: usize, with: char) {
    let line: String = std::iter::repeat_n(with, width).collect();
    let end = if with == '=' { '|' } else { '+' };
    println!("{end}{line}{end}");
}

/// Lines of a table's head, then the line below it.
fn head(width: usize, lines: &[&str]) {
    rule(width, '-');
    for line in lines {
        println!("|{line:<width$}|");
    }
    rule(width, '=');
}

fn row(width: usize, lines: &[String]) {
    for line in lines {
        println!("|{line:<width$}|");
    }
    rule(width, '-');
}

/// GiB with two decimals, the rest cut off.
fn gib(mib: u64) -> String {
    format!("{}.{:02}", mib / 1024, mib % 1024 * 100 / 1024)
}

pub(super) fn list_gi_profiles(nvml: &Nvml, gpus: &[&Selected]) -> Smi<()> {
    const WIDTH: usize = 77;
    head(
        WIDTH,
        &[
            " GPU instance profiles:",
            " GPU   Name             ID    Instances   Memory     P2P    SM    DEC   ENC",
            "                              Free/Total   GiB              CE    JPEG  OFA",
        ],
    );
    for gpu in gpus {
        for profile in nvml.gi_profiles(gpu.handle)? {
            let name = "nvmlDeviceGetGpuInstanceRemainingCapacity";
            let free = nvml.number_of(name, gpu.handle, profile.id).unwrap_or(0);
            let p2p = if profile.p2p == 0 { "No" } else { "Yes" };
            row(
                WIDTH,
                &[
                    format!(
                        "{:>4}  {:<18}{:>2}    {:>2}/{:<9}{:<11}{p2p:<6}{:>3}{:>6}{:>6}",
                        gpu.index,
                        profile.name(),
                        profile.id,
                        free,
                        profile.instances,
                        gib(profile.memory_mib),
                        profile.sm,
                        profile.dec,
                        profile.enc,
                    ),
                    format!("{:>62}{:>6}{:>6}", profile.ce, profile.jpg, profile.ofa),
                ],
            );
        }
    }
    Ok(())
}

pub(super) fn list_placements(nvml: &Nvml, gpus: &[&Selected]) -> Smi<()> {
    for gpu in gpus {
        for profile in nvml.gi_profiles(gpu.handle)? {
            let places = nvml.placements(gpu.handle, profile.id)?;
            let starts: Vec<String> = places.iter().map(|place| place.start.to_string()).collect();
            let size = places.first().map_or(0, |place| place.size);
            let end = if places.len() == 1 { "Placement " } else { "Placements" };
            println!(
                "GPU {:>2} Profile ID {:>2} {end}: {{{}}}:{size}",
                gpu.index,
                profile.id,
                starts.join(",")
            );
        }
    }
    Ok(())
}

fn profile_name(nvml: &Nvml, device: Handle, id: u32) -> Smi<String> {
    let found = nvml.gi_profiles(device)?.into_iter().find(|profile| profile.id == id);
    Ok(found.map_or_else(|| format!("MIG profile {id}"), |profile| profile.name()))
}

pub(super) fn list_gis(nvml: &Nvml, gpus: &[&Selected]) -> Smi<()> {
    const WIDTH: usize = 55;
    let mut rows = Vec::new();
    for gpu in gpus {
        for (_, gi) in nvml.gis(gpu.handle)? {
            let name = profile_name(nvml, gpu.handle, gi.profile)?;
            let place = format!("{}:{}", gi.placement.start, gi.placement.size);
            rows.push(format!("{:>4}  {name:<19}{:>3}{:>9}{place:>13}", gpu.index, gi.profile, gi.id));
        }
    }
    if rows.is_empty() {
        println!("No GPU instances found: {}", text_of(6));
        return Err(SmiError::Nvml(6));
    }
    head(
        WIDTH,
        &[
            " GPU instances:",
            " GPU   Name             Profile  Instance   Placement",
            "                          ID       ID       Start:Size",
        ],
    );
    rows.into_iter().for_each(|line| row(WIDTH, &[line]));
    Ok(())
}

pub(super) fn list_ci_profiles(nvml: &Nvml, gpus: &[&Selected], options: &Options) -> Smi<()> {
    const WIDTH: usize = 86;
    head(
        WIDTH,
        &[
            " Compute instance profiles:",
            " GPU     GPU       Name             Profile  Instances   Exclusive       Shared",
            "       Instance                       ID     Free/Total     SM       DEC   ENC   OFA",
            "         ID                                                          CE    JPEG",
        ],
    );
    for gpu in gpus {
        for (handle, gi) in nvml.gis(gpu.handle)?.into_iter().filter(|(_, gi)| options.wants_gi(gi.id)) {
            for profile in nvml.ci_profiles(handle)? {
                let name = "nvmlGpuInstanceGetComputeInstanceRemainingCapacity";
                let free = nvml.number_of(name, handle, profile.id)?;
                // The default of `-cci` is marked.
                let mark = if is_whole(&profile.name()) { '*' } else { ' ' };
                row(
                    WIDTH,
                    &[
                        format!(
                            "{:>4}{:>7}       {:<21}{:>2}{mark}     {free:>2}/{:<10}{:>3}{:>9}{:>6}{:>6}",
                            gpu.index,
                            gi.id,
                            profile.name(),
                            profile.id,
                            profile.instances,
                            profile.sm,
                            profile.dec,
                            profile.enc,
                            profile.ofa,
                        ),
                        format!("{:>71}{:>6}", profile.ce, profile.jpg),
                    ],
                );
            }
        }
    }
    Ok(())
}

pub(super) fn list_cis(nvml: &Nvml, gpus: &[&Selected], options: &Options) -> Smi<()> {
    const WIDTH: usize = 68;
    let mut rows = Vec::new();
    for gpu in gpus {
        for (handle, gi) in nvml.gis(gpu.handle)?.into_iter().filter(|(_, gi)| options.wants_gi(gi.id)) {
            let profiles = nvml.ci_profiles(handle)?;
            for (_, ci) in nvml.cis(handle)? {
                let name =
                    profiles.iter().find(|profile| profile.id == ci.profile).map(|profile| profile.name());
                let place = format!("{}:{}", ci.placement.start, ci.placement.size);
                rows.push(format!(
                    "{:>4}{:>7}       {:<21}{:>2}{:>10}{place:>13}",
                    gpu.index,
                    gi.id,
                    name.unwrap_or_default(),
                    ci.profile,
                    ci.id,
                ));
            }
        }
    }
    if rows.is_empty() {
        println!("No compute instances found: {}", text_of(6));
        return Err(SmiError::Nvml(6));
    }
    head(
        WIDTH,
        &[
            " Compute instances:",
            " GPU     GPU       Name             Profile   Instance   Placement",
            "       Instance                       ID        ID       Start:Size",
            "         ID",
        ],
    );
    rows.into_iter().for_each(|line| row(WIDTH, &[line]));
    Ok(())
}
