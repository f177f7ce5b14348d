//! `nvidia-smi mig`: listing, creating and destroying instances, in the words and tables of the real program.

mod change;
mod tables;

use super::Selected;
use super::library::{Nvml, Smi, SmiError};

const NO_MIG: &str = "No MIG-enabled devices found.";

/// What is asked for.
#[derive(Default)]
pub(super) struct Options {
    gis: Option<Vec<u32>>,
    cis: Option<Vec<u32>>,
    action: Option<Action>,
    /// `-C`: compute instances with the GPU instances.
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
    /// Reads the arguments behind `mig`, but `-i` and its value.
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

/// Runs the command; prints as it goes.
pub(super) fn run(nvml: &Nvml, gpus: &[Selected], options: &Options) -> Smi<()> {
    let Some(action) = &options.action else {
        return Err(SmiError::Usage(
            "Give one of -lgip, -lgipp, -lgi, -lcip, -lci, -cgi, -cci, -dgi, -dci.".to_owned(),
        ));
    };
    // Profiles and placements are told while MIG is off.
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
        Action::ListGiProfiles => tables::list_gi_profiles(nvml, &capable),
        Action::ListGiPlacements => tables::list_placements(nvml, &capable),
        Action::ListGis => tables::list_gis(nvml, &capable),
        Action::ListCiProfiles => tables::list_ci_profiles(nvml, &capable, options),
        Action::ListCis => tables::list_cis(nvml, &capable, options),
        Action::CreateGi(wanted) => {
            capable.iter().try_for_each(|gpu| change::create_gis(nvml, gpu, wanted, options.whole))
        }
        Action::CreateCi(wanted) => {
            capable.iter().try_for_each(|gpu| change::create_cis(nvml, gpu, wanted, options))
        }
        Action::DestroyGi => change::destroy_gis(nvml, &capable, options),
        Action::DestroyCi => change::destroy_cis(nvml, &capable, options),
    }
}
