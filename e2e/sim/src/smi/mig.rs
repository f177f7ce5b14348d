//! `nvidia-smi mig`: lists, creates and destroys instances with the real program's output.

use super::nvml::{Handle, Nvml, Placement, Selected, Smi, SmiError, text_of};

const NO_MIG: &str = "No MIG-enabled devices found.";

/// The parsed arguments.
#[derive(Default)]
pub(super) struct Options {
    gis: Option<Vec<u32>>,
    cis: Option<Vec<u32>>,
    action: Option<Action>,
    /// `-C`: also create a compute instance in each GPU instance.
    whole: bool,
}

enum Action {
    ListGiProfiles,
    ListGiPlacements,
    ListGis,
    ListCiProfiles,
    ListCis,
    CreateGi(Vec<String>),
    CreateCi(Vec<String>),
    DestroyGi,
    DestroyCi,
}

impl Options {
    /// Parses the arguments after `mig`, without `-i` and its value.
    pub(super) fn parse(arguments: &[String]) -> Smi<Self> {
        let mut options = Self::default();
        let mut rest = arguments.iter().peekable();
        while let Some(argument) = rest.next() {
            let (name, inline) = match argument.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (argument.as_str(), None),
            };
            let mut value =
                || inline.clone().or_else(|| rest.next_if(|next| !next.starts_with('-')).cloned());
            let action = match name {
                "-lgip" | "--list-gpu-instance-profiles" => Action::ListGiProfiles,
                "-lgipp" | "--list-gpu-instance-possible-placements" => Action::ListGiPlacements,
                "-lgi" | "--list-gpu-instances" => Action::ListGis,
                "-lcip" | "--list-compute-instance-profiles" => Action::ListCiProfiles,
                "-lci" | "--list-compute-instances" => Action::ListCis,
                "-cgi" | "--create-gpu-instance" => {
                    Action::CreateGi(list(&value().ok_or_else(|| missing(name))?))
                }
                "-cci" | "--create-compute-instance" => {
                    Action::CreateCi(value().map_or_else(Vec::new, |value| list(&value)))
                }
                "-dgi" | "--destroy-gpu-instance" => Action::DestroyGi,
                "-dci" | "--destroy-compute-instance" => Action::DestroyCi,
                "-gi" | "--gpu-instance-id" => {
                    options.gis = Some(numbers(&value().ok_or_else(|| missing(name))?)?);
                    continue;
                }
                "-ci" | "--compute-instance-id" => {
                    options.cis = Some(numbers(&value().ok_or_else(|| missing(name))?)?);
                    continue;
                }
                "-C" | "--default-compute-instance" => {
                    options.whole = true;
                    continue;
                }
                _ => {
                    return Err(SmiError::Usage(format!(
                        "Invalid combination of input arguments: {argument}"
                    )));
                }
            };
            if options.action.replace(action).is_some() {
                return Err(SmiError::Usage("Invalid combination of input arguments.".to_owned()));
            }
        }
        Ok(options)
    }

    fn wants_gi(&self, id: u32) -> bool {
        self.gis.as_ref().is_none_or(|ids| ids.contains(&id))
    }

    fn wants_ci(&self, id: u32) -> bool {
        self.cis.as_ref().is_none_or(|ids| ids.contains(&id))
    }
}

fn missing(name: &str) -> SmiError {
    SmiError::Usage(format!("Option {name} is missing its value."))
}

fn list(text: &str) -> Vec<String> {
    text.split(',').map(|part| part.trim().to_owned()).collect()
}

fn numbers(text: &str) -> Smi<Vec<u32>> {
    let wrong = |part: &String| SmiError::Usage(format!("Unable to parse instance ID {part:?}."));
    list(text).iter().map(|part| part.parse().map_err(|_| wrong(part))).collect()
}

/// Runs the command and prints its output.
pub(super) fn run(nvml: &Nvml, gpus: &[Selected], options: &Options) -> Smi<()> {
    let Some(action) = &options.action else {
        return Err(SmiError::Usage(
            "Give one of -lgip, -lgipp, -lgi, -lcip, -lci, -cgi, -cci, -dgi, -dci.".to_owned(),
        ));
    };
    // Profiles and placements can also be listed while MIG is off.
    let always = matches!(action, Action::ListGiProfiles | Action::ListGiPlacements);
    let capable: Vec<&Selected> = gpus
        .iter()
        .filter(|gpu| nvml.mig_mode(gpu.handle).is_ok_and(|(current, _)| always || current == 1))
        .collect();
    if capable.is_empty() {
        println!("{NO_MIG}");
        return Err(SmiError::Nvml(6));
    }
    match action {
        Action::ListGiProfiles => list_gi_profiles(nvml, &capable),
        Action::ListGiPlacements => list_placements(nvml, &capable),
        Action::ListGis => list_gis(nvml, &capable),
        Action::ListCiProfiles => list_ci_profiles(nvml, &capable, options),
        Action::ListCis => list_cis(nvml, &capable, options),
        Action::CreateGi(wanted) => {
            capable.iter().try_for_each(|gpu| create_gis(nvml, gpu, wanted, options.whole))
        }
        Action::CreateCi(wanted) => capable.iter().try_for_each(|gpu| create_cis(nvml, gpu, wanted, options)),
        Action::DestroyGi => destroy_gis(nvml, &capable, options),
        Action::DestroyCi => destroy_cis(nvml, &capable, options),
    }
}

/// Whether the name is of a compute instance that has all slices of its GPU instance.
fn is_whole(name: &str) -> bool {
    !name.split('.').next().is_some_and(|first| first.ends_with('c'))
}

/// Accepts `19`, `1g.10gb` and `MIG 1g.10gb`, each optionally with `:start`.
fn create_gis(nvml: &Nvml, gpu: &Selected, wanted: &[String], whole: bool) -> Smi<()> {
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

/// Creates a compute instance; without a name, one with all slices.
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
            "Unable to create a compute instance on GPU {:>2} GPU instance ID {gi_id:>2} using profile \
             {}: {error}",
            gpu.index, profile.id
        );
        failed("Failed to create compute instances", error)
    })?;
    println!(
        "Successfully created compute instance ID {:>2} on GPU {:>2} GPU instance ID {gi_id:>2} using \
         profile {} (ID {:>2})",
        info.id,
        gpu.index,
        profile.name(),
        profile.id
    );
    Ok(())
}

fn create_cis(nvml: &Nvml, gpu: &Selected, wanted: &[String], options: &Options) -> Smi<()> {
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

fn destroy_gis(nvml: &Nvml, gpus: &[&Selected], options: &Options) -> Smi<()> {
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

fn destroy_cis(nvml: &Nvml, gpus: &[&Selected], options: &Options) -> Smi<()> {
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

fn rule(width: usize, with: char) {
    let line: String = std::iter::repeat_n(with, width).collect();
    let end = if with == '=' { '|' } else { '+' };
    println!("{end}{line}{end}");
}

/// Prints the header lines of a table and the line below them.
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

/// GiB with two decimals, truncated.
fn gib(mib: u64) -> String {
    format!("{}.{:02}", mib / 1024, mib % 1024 * 100 / 1024)
}

fn list_gi_profiles(nvml: &Nvml, gpus: &[&Selected]) -> Smi<()> {
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

fn list_placements(nvml: &Nvml, gpus: &[&Selected]) -> Smi<()> {
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

fn list_gis(nvml: &Nvml, gpus: &[&Selected]) -> Smi<()> {
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

fn list_ci_profiles(nvml: &Nvml, gpus: &[&Selected], options: &Options) -> Smi<()> {
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
                // The default profile of `-cci` is marked.
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

fn list_cis(nvml: &Nvml, gpus: &[&Selected], options: &Options) -> Smi<()> {
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
