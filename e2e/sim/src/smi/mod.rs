//! The stand-in for `nvidia-smi`, with the options that drivers and people use, over the same
//! library.
//!
//! The output has the format of the real program, because programs parse it. NVML has no call for
//! the time slice of `compute-policy`; the stand-in changes it in the state.

mod mig;
mod nvml;
mod query;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::code::Code;
use crate::control::Call;
use crate::sim::Sim;
use crate::state::State;
use nvml::{Handle, Nvml, Selected, Smi, SmiError, text_of};

const HELP: &str = "\
nvidia-smi [OPTION] ...
    -L, --list-gpus                     GPUs and MIG devices with their UUIDs
    -q, --query [-x, --xml-format]      all properties
    --query-gpu=FIELD,... --format=csv[,noheader][,nounits]
    -mig, --multi-instance-gpu=0|1      MIG mode
    -c, --compute-mode=MODE             DEFAULT (0), PROHIBITED (2), EXCLUSIVE_PROCESS (3)
    -pm, --persistence-mode=0|1
    -r, --gpu-reset
    -i, --id=LIST                       indices, UUIDs or PCI addresses of GPUs
nvidia-smi mig -lgip | -lgipp | -lgi | -lcip | -lci | -cgi LIST [-C] | -cci [LIST] | -dgi | -dci
               [-i LIST] [-gi LIST] [-ci LIST]
nvidia-smi compute-policy -l | --set-timeslice=0|1|2|3 [-i LIST]
nvidia-smi --version";

/// Call name for rules and the trace: `nvidia-smi` reads or sets a time slice. The trace shows the
/// new value.
pub const COMPUTE_POLICY: &str = "compute-policy";

/// The parsed command.
enum Command {
    Table,
    List,
    Query { xml: bool },
    Csv { fields: String, format: String },
    MigMode(bool),
    ComputeMode(u32),
    Persistence(bool),
    Reset,
    Mig(mig::Options),
    ListPolicy,
    Timeslice(u32),
    Version,
    Help,
}

/// Main of `nvidia-smi`.
pub fn main() -> ExitCode {
    nvml::die_of_closed_pipes();
    let arguments: Vec<String> = std::env::args().collect();
    let (name, rest) =
        arguments.split_first().map_or(("nvidia-smi", [].as_slice()), |(name, rest)| (name, rest));
    match parse(rest).and_then(|(command, ids)| run(&program(name), &command, ids.as_deref())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // NOT_FOUND was already reported by the command.
            if !matches!(error, SmiError::Nvml(6)) {
                println!("{error}");
            }
            ExitCode::from(error.status())
        }
    }
}

/// The path by which this program was called, without following links: its directory determines the
/// driver root.
fn program(name: &str) -> PathBuf {
    if name.contains('/') {
        return PathBuf::from(name);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.exists());
    found.unwrap_or_else(|| PathBuf::from(name))
}

/// Parses the command and the value of `-i`.
fn parse(arguments: &[String]) -> Smi<(Command, Option<String>)> {
    let (ids, rest) = without_id(arguments)?;
    let usage =
        |text: &str| SmiError::Usage(format!("{text}\nRun 'nvidia-smi --help' for more information."));
    let command = match rest.split_first() {
        Some((first, rest)) if first == "mig" => Command::Mig(mig::Options::parse(rest)?),
        Some((first, rest)) if first == "compute-policy" => policy(rest)?,
        _ => options(&rest).ok_or_else(|| usage("Invalid combination of input arguments."))?,
    };
    Ok((command, ids))
}

/// Removes `-i` and its value from the arguments.
fn without_id(arguments: &[String]) -> Smi<(Option<String>, Vec<String>)> {
    let (mut ids, mut rest) = (None, Vec::new());
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.split_once('=') {
            Some(("-i" | "--id", value)) => ids = Some(value.to_owned()),
            _ if argument == "-i" || argument == "--id" => {
                let value = arguments.next();
                ids = Some(
                    value
                        .ok_or_else(|| SmiError::Usage(format!("Option {argument} is missing its value.")))?
                        .clone(),
                );
            }
            _ => rest.push(argument.clone()),
        }
    }
    Ok((ids, rest))
}

/// Splits `--name=value` into two words.
fn words(arguments: &[String]) -> Vec<&str> {
    let mut words = Vec::new();
    for argument in arguments {
        match argument.split_once('=') {
            Some((name, value)) => words.extend([name, value]),
            None => words.push(argument.as_str()),
        }
    }
    words
}

fn policy(arguments: &[String]) -> Smi<Command> {
    let levels = ["default", "short", "medium", "long"];
    match words(arguments).as_slice() {
        ["-l" | "--list"] => Ok(Command::ListPolicy),
        ["--set-timeslice", value] => {
            let named = levels.iter().position(|level| level.eq_ignore_ascii_case(value)).map(|at| at as u32);
            let level = value.parse().ok().or(named).filter(|level| *level < 4);
            level.map(Command::Timeslice).ok_or_else(|| {
                SmiError::Usage(format!(
                    "{value:?} is not a time slice: 0 (default), 1 (short), 2 (medium), 3 (long)."
                ))
            })
        }
        _ => Err(SmiError::Usage("Give -l or --set-timeslice.".to_owned())),
    }
}

fn options(arguments: &[String]) -> Option<Command> {
    let switch = |value: &str| match value {
        "0" | "DISABLED" => Some(false),
        "1" | "ENABLED" => Some(true),
        _ => None,
    };
    Some(match words(arguments).as_slice() {
        [] => Command::Table,
        ["-h" | "--help"] => Command::Help,
        ["--version"] => Command::Version,
        ["-L" | "--list-gpus"] => Command::List,
        ["-q" | "--query"] => Command::Query { xml: false },
        ["-q" | "--query", "-x" | "--xml-format"] | ["-x" | "--xml-format", "-q" | "--query"] | ["-qx"] => {
            Command::Query { xml: true }
        }
        ["--query-gpu", fields, "--format", format] | ["--format", format, "--query-gpu", fields] => {
            Command::Csv { fields: (*fields).to_owned(), format: (*format).to_owned() }
        }
        ["-mig" | "--multi-instance-gpu", value] => Command::MigMode(switch(value)?),
        ["-pm" | "--persistence-mode", value] => Command::Persistence(switch(value)?),
        ["-c" | "--compute-mode", value] => Command::ComputeMode(match *value {
            "0" | "DEFAULT" => 0,
            "1" | "EXCLUSIVE_THREAD" => 1,
            "2" | "PROHIBITED" => 2,
            "3" | "EXCLUSIVE_PROCESS" => 3,
            _ => return None,
        }),
        ["-r" | "--gpu-reset"] => Command::Reset,
        _ => return None,
    })
}

fn run(program: &Path, command: &Command, ids: Option<&str>) -> Smi<()> {
    if matches!(command, Command::Help) {
        println!("{HELP}");
        return Ok(());
    }
    let nvml = Nvml::load(Some(program))?;
    if matches!(command, Command::Version) {
        println!("NVIDIA-SMI version  : {}", nvml.driver_version()?);
        println!("DRIVER version      : {}", nvml.driver_version()?);
        println!("CUDA Version        : {}", nvml.cuda_version()?);
        return Ok(());
    }
    let gpus = select(&nvml, ids)?;
    match command {
        Command::Help | Command::Version => Ok(()),
        Command::Table => query::table(&nvml, &gpus),
        Command::List => query::list(&nvml, &gpus),
        Command::Query { xml } => query::query(&nvml, &gpus, *xml),
        Command::Csv { fields, format } => query::csv(&nvml, &gpus, fields, format),
        Command::Mig(options) => mig::run(&nvml, &gpus, options),
        Command::MigMode(on) => each(&nvml, &gpus, |gpu, bus_id| set_mig_mode(&nvml, gpu, bus_id, *on)),
        Command::ComputeMode(mode) => each(&nvml, &gpus, |gpu, bus_id| {
            nvml.set_compute_mode(gpu, *mode)?;
            println!("Set compute mode to {} for GPU {bus_id}.", query::compute_mode(*mode).to_uppercase());
            Ok(())
        }),
        Command::Persistence(on) => each(&nvml, &gpus, |gpu, bus_id| {
            nvml.set_persistence(gpu, *on)?;
            let text = if *on { "Enabled" } else { "Disabled" };
            println!("{text} persistence mode for GPU {bus_id}.");
            Ok(())
        }),
        Command::Reset => each(&nvml, &gpus, |gpu, bus_id| {
            change(&nvml, gpu, |state, slot| state.reset(slot, false))?;
            println!("GPU {bus_id} was successfully reset.");
            Ok(())
        }),
        Command::Timeslice(level) => each(&nvml, &gpus, |gpu, bus_id| {
            policy_call(&nvml, gpu, &[(*level).into()], |sim, slot| {
                if !sim.privileged(&*sim.read()?) {
                    return Err(Code::NoPermission);
                }
                Ok(sim.update(|state| {
                    state.gpu_mut(slot)?.timeslice = *level;
                    Ok(())
                })?)
            })?;
            println!("Timeslice for GPU {bus_id} set to {}.", crate::gpu_map::timeslice(*level));
            Ok(())
        }),
        Command::ListPolicy => gpus.iter().try_for_each(|gpu| {
            let level =
                policy_call(&nvml, gpu.handle, &[], |sim, slot| Ok(sim.read()?.gpu(slot)?.timeslice))?;
            println!(
                "Timeslice for GPU {}: {}",
                nvml.pci(gpu.handle)?.bus_id(),
                crate::gpu_map::timeslice(level)
            );
            Ok(())
        }),
    }
}

/// Runs `act` for each GPU, then prints that all is done.
fn each(nvml: &Nvml, gpus: &[Selected], act: impl Fn(Handle, &str) -> Smi<()>) -> Smi<()> {
    for gpu in gpus {
        act(gpu.handle, &nvml.pci(gpu.handle)?.bus_id())?;
    }
    println!("All done.");
    Ok(())
}

fn set_mig_mode(nvml: &Nvml, gpu: Handle, bus_id: &str, on: bool) -> Smi<()> {
    let word = if on { "enable" } else { "disable" };
    let failed = |error| match error {
        SmiError::Nvml(code) => {
            SmiError::Failed { what: format!("Unable to {word} MIG Mode for GPU {bus_id}"), code }
        }
        other => other,
    };
    match nvml.set_mig_mode(gpu, on).map_err(failed)? {
        0 => println!("{} MIG Mode for GPU {bus_id}", if on { "Enabled" } else { "Disabled" }),
        code => {
            println!("Warning: MIG mode is in pending {word} state for GPU {bus_id}:{}", text_of(code));
            if code == 19 {
                println!(
                    "{bus_id} is currently being used by one or more other processes (e.g. CUDA application \
                     or a monitoring application such as another instance of nvidia-smi). Please first kill \
                     all processes using the device and retry the command or reboot the system to make MIG \
                     mode effective."
                );
            }
        }
    }
    Ok(())
}

/// The GPUs that `-i` selects, or all.
fn select(nvml: &Nvml, ids: Option<&str>) -> Smi<Vec<Selected>> {
    let all: Vec<Selected> = (0..nvml.count()?)
        .map(|index| nvml.device(index).map(|handle| Selected { index, handle }))
        .collect::<Smi<_>>()?;
    let Some(ids) = ids else {
        if all.is_empty() {
            println!("No devices were found");
            return Err(SmiError::Nvml(6));
        }
        return Ok(all);
    };
    let wanted: Vec<&str> = ids.split(',').map(str::trim).collect();
    let named = |gpu: &Selected, id: &str| -> Smi<bool> {
        let same_bus = nvml.pci(gpu.handle)?.bus_id().to_lowercase().ends_with(&id.to_lowercase());
        Ok(id == gpu.index.to_string() || id == nvml.uuid(gpu.handle)? || (id.contains(':') && same_bus))
    };
    let mut found = Vec::new();
    for id in wanted {
        let mut matching = None;
        for gpu in &all {
            if named(gpu, id)? {
                matching = Some(Selected { index: gpu.index, handle: gpu.handle });
            }
        }
        found.push(matching.ok_or_else(|| SmiError::Usage(format!("No devices were found: {id}")))?);
    }
    Ok(found)
}

/// Changes the state directly, for settings without an NVML call.
fn change<T>(nvml: &Nvml, gpu: Handle, change: impl FnOnce(&mut State, usize) -> Result<T, Code>) -> Smi<T> {
    let (sim, slot) = sim_and_slot(nvml, gpu)?;
    sim.update(|state| change(state, slot)).map_err(|failure| refused(failure.into()))
}

/// Runs a `compute-policy` call under the simulator's rules.
fn policy_call<T>(
    nvml: &Nvml,
    gpu: Handle,
    args: &[u64],
    effect: impl FnOnce(&Sim, usize) -> Result<T, Code>,
) -> Smi<T> {
    let (sim, slot) = sim_and_slot(nvml, gpu)?;
    let call = Call { name: COMPUTE_POLICY, gpu: Some(slot), args };
    sim.call(call, || effect(&sim, slot)).map_err(refused)
}

/// The simulator of the loaded library, and the GPU's slot in it.
fn sim_and_slot(nvml: &Nvml, gpu: Handle) -> Smi<(Sim, usize)> {
    let uuid = nvml.uuid(gpu)?;
    let sim = Sim::from_library_path(&nvml.file()).map_err(|_| refused(Code::DriverNotLoaded))?;
    let state = sim.read().map_err(|failure| refused(failure.into()))?;
    let slot = state.gpus.iter().position(|gpu| gpu.uuid == uuid);
    Ok((sim, slot.ok_or_else(|| refused(Code::NotFound))?))
}

fn refused(code: Code) -> SmiError {
    SmiError::Nvml(code.into())
}
