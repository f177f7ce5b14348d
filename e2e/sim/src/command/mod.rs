//! The command line: `divvy-sim`, and the stand-ins that share its program.
//!
//! Every command does one operation of [`crate::operations`] on the simulator in `--root`, so that
//! the command line and tests can do the same.

mod args;

use crate::catalogue;
use crate::code::Code;
use crate::control::{Latency, Pattern, When, is_alive};
use crate::operations::HealthChange;
use crate::sim::Sim;
use crate::state::{Holder, Host, Loss, Privilege, Process, State};
use crate::{driver_root, gpu_map, modprobe, mps, smi};
use anyhow::{Context, Result, bail};
use args::{Args, Command, GpuArg, ProcessCommand, Side, Toggle};
use clap::Parser;
use std::ffi::OsStr;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Main of `divvy-sim`, and of the stand-ins when called by their names.
pub fn main() -> ExitCode {
    if let Some(code) = multicall() {
        return code;
    }
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("divvy-sim: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the stand-in that this process was called as, if any.
pub fn multicall() -> Option<ExitCode> {
    let name = std::env::args_os().next()?;
    match Path::new(&name).file_name().and_then(OsStr::to_str)? {
        "nvidia-smi" => Some(smi::main()),
        "nvidia-modprobe" => Some(modprobe::main()),
        "nvidia-cuda-mps-control" => Some(mps::control_main()),
        "nvidia-cuda-mps-server" => Some(mps::server_main()),
        _ => None,
    }
}

fn run(args: Args) -> Result<()> {
    let root = args.root;
    let open = || -> Result<Sim> {
        let root = root.clone().context("no simulator given; use --root DIR or set DIVVY_SIM")?;
        Ok(Sim::open(root)?)
    };
    match args.command {
        Command::Up(up) => bring_up(up),
        Command::Catalogue => print(&list_models()),
        Command::Show { json } => show(&open()?, json),
        Command::Xid { gpu, xid, instance } => {
            change(&open()?, Some(&gpu), |state, slot| state.xid(slot, xid, instance))
        }
        Command::Recovery { gpu, action } => {
            change(&open()?, Some(&gpu), |state, slot| state.set_recovery_action(slot, action))
        }
        Command::Health(health) => {
            let wanted = HealthChange {
                ecc_corrected: health.ecc_corrected,
                ecc_uncorrected: health.ecc_uncorrected,
                rows_corrected: health.rows_corrected,
                rows_uncorrected: health.rows_uncorrected,
                remap_pending: health.remap_pending,
                remap_failed: health.remap_failed,
                sram_threshold_exceeded: health.sram_threshold_exceeded,
                recovery_action: health.recovery_action,
            };
            let events = health.events;
            change(&open()?, Some(&health.gpu), |state, slot| state.set_health(slot, wanted, events))
        }
        Command::Lose { gpu, comes_back, silent, code } => {
            let loss = Loss { silent, code: Some(code).filter(|code| *code != Code::GpuIsLost) };
            change(&open()?, Some(&gpu), |state, slot| state.lose_as(slot, comes_back, loss))
        }
        Command::Find { gpu } => change(&open()?, Some(&gpu), State::find),
        Command::Plug { model } => change(&open()?, None, |state, _| state.plug(model).map(drop)),
        Command::Unplug { gpu } => change(&open()?, Some(&gpu), State::unplug),
        Command::Replace { gpu } => change(&open()?, Some(&gpu), State::replace_gpu),
        Command::Migrate => change(&open()?, None, |state, _| {
            state.migrate();
            Ok(())
        }),
        Command::Reset { gpu, force } => change(&open()?, Some(&gpu), |state, slot| state.reset(slot, force)),
        Command::Reboot => change(&open()?, None, |state, _| {
            state.reboot();
            Ok(())
        }),
        Command::Driver { step, version } => driver(&open()?, &step, version.as_deref()),
        Command::Process { command } => process(&open()?, command),
        Command::Latency { call, ms, global_lock, gpu } => {
            let sim = open()?;
            let pattern = pattern(&sim, call, gpu.as_ref())?;
            change(&sim, None, |state, _| {
                state.set_latency(Latency { pattern, ms, global_lock });
                Ok(())
            })
        }
        Command::Fault { call, code, nth, after, gpu, clear } => {
            fault(&open()?, call, code, nth, after, gpu.as_ref(), clear)
        }
        Command::Hold { call, side, nth, gpu } => {
            let sim = open()?;
            let pattern = pattern(&sim, call, gpu.as_ref())?;
            change(&sim, None, |state, _| {
                state.add_hold(pattern, nth, side.when());
                Ok(())
            })
        }
        Command::Held { wait } => held(&open()?, wait),
        Command::Release { call } => change(&open()?, None, |state, _| {
            state.release(call.as_deref());
            Ok(())
        }),
        Command::Client(client) => {
            let wanted = mps::ClientOptions {
                pipe: client.pipe,
                uid: client.uid,
                name: client.name,
                memory_mib: client.memory,
                device: client.device,
                stubborn: client.stubborn,
                time: client.seconds.map(Duration::try_from_secs_f64).transpose().context("--for")?,
            };
            // In a container, the simulator is at the root directory.
            mps::client_main(&wanted, || Ok(Sim::open(root.unwrap_or_else(|| "/".into()))?))
        }
        Command::Trace { toggle } => trace(&open()?, toggle),
    }
}

fn bring_up(wanted: args::Up) -> Result<()> {
    let library = match wanted.library {
        Some(library) => library,
        None => driver_root::library()?,
    };
    let multicall = match wanted.program {
        Some(program) => program,
        None => std::env::current_exe().context("cannot find this program")?,
    };
    let mut options = driver_root::Options::new(library, multicall);
    options.driver = wanted.driver;
    options.cuda = wanted.cuda;
    options.seed = wanted.seed;
    options.numa_nodes = wanted.numa_nodes;
    options.host = Host {
        vm: wanted.vm,
        bare: wanted.no_nodes,
        mknod: wanted.mknod,
        fresh_uuids: wanted.fresh_uuids,
        divides_samples: wanted.divides_samples,
        mig_mode_errors: wanted.mig_mode_errors,
        node_delay_ms: wanted.node_delay,
        switch_us: wanted.switch_cost,
        privilege: if wanted.unprivileged { Privilege::Nobody } else { Privilege::Owner },
    };
    let sim = driver_root::create(&wanted.dir, &wanted.gpus, &options)?;
    sim.start_node_helper()?;
    show(&sim, false)
}

fn show(sim: &Sim, json: bool) -> Result<()> {
    // A process that may not write the state still sees dead processes.
    drop(sim.remove_dead_processes());
    let state = sim.read()?;
    if json {
        return print(&format!("{}\n", serde_json::to_string_pretty(&*state)?));
    }
    print(&gpu_map::draw_gpus(&state, std::io::stdout().is_terminal()))
}

/// Runs one operation on a GPU or on the node.
fn change(
    sim: &Sim,
    gpu: Option<&GpuArg>,
    operation: impl FnOnce(&mut State, usize) -> Result<(), Code>,
) -> Result<()> {
    let slot = match gpu {
        Some(gpu) => slot(&*sim.read()?, gpu)?,
        None => 0,
    };
    sim.update(|state| operation(state, slot))?;
    Ok(sim.start_node_helper()?)
}

fn slot(state: &State, gpu: &GpuArg) -> Result<usize> {
    let found = match gpu {
        GpuArg::Slot(slot) => Some(*slot).filter(|slot| *slot < state.gpus.len()),
        GpuArg::Uuid(uuid) => state.gpus.iter().position(|gpu| gpu.uuid == *uuid),
    };
    found.with_context(|| format!("no GPU {gpu}; `divvy-sim show` lists {} GPUs", state.gpus.len()))
}

fn pattern(sim: &Sim, call: String, gpu: Option<&GpuArg>) -> Result<Pattern> {
    let gpu = match gpu {
        Some(gpu) => Some(slot(&*sim.read()?, gpu)?),
        None => None,
    };
    Ok(Pattern { call, gpu })
}

fn driver(sim: &Sim, step: &str, version: Option<&str>) -> Result<()> {
    match (step, version) {
        ("unload", None) => driver_root::unload_driver(sim)?,
        ("load", Some(version)) => driver_root::load_driver(sim, version)?,
        (version, None) => driver_root::replace_driver(sim, version)?,
        (_, Some(_)) => bail!("only `driver load` takes a version; use `driver {step}`"),
    }
    Ok(sim.start_node_helper()?)
}

fn process(sim: &Sim, command: ProcessCommand) -> Result<()> {
    match command {
        ProcessCommand::Add { gpu, pid, name, instance, memory, kind } => {
            let process = Process { pid, name, kind: kind.kind(), instance, memory_mib: memory };
            change(sim, Some(&gpu), |state, slot| state.add_process(slot, process))
        }
        ProcessCommand::Hold { gpu, pid, name, gi } => {
            let holder = Holder { pid, name, gi };
            change(sim, Some(&gpu), |state, slot| state.add_holder(slot, holder))
        }
        ProcessCommand::Remove { pid, gpu: Some(gpu) } => {
            change(sim, Some(&gpu), |state, slot| state.remove_process(Some(slot), pid))
        }
        ProcessCommand::Remove { pid, gpu: None } => {
            change(sim, None, |state, _| state.remove_process(None, pid))
        }
    }
}

fn fault(
    sim: &Sim,
    call: Option<String>,
    code: Option<Code>,
    nth: Option<u64>,
    after: bool,
    gpu: Option<&GpuArg>,
    clear: bool,
) -> Result<()> {
    if clear {
        return change(sim, None, |state, _| {
            state.clear_faults(call.as_deref());
            Ok(())
        });
    }
    let (Some(call), Some(code)) = (call, code) else { bail!("a fault needs a call and a code") };
    let pattern = pattern(sim, call, gpu)?;
    let when = if after { When::After } else { When::Before };
    change(sim, None, |state, _| {
        state.add_fault(pattern, nth, when, code);
        Ok(())
    })
}

/// Prints the blocked calls. With `wait`, waits for one first.
fn held(sim: &Sim, wait: Option<u64>) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(wait.unwrap_or(0));
    loop {
        let state = sim.read()?;
        let mut text = String::new();
        for held in state.control.held.iter().filter(|held| is_alive(held)) {
            text.push_str(&serde_json::to_string(held)?);
            text.push('\n');
        }
        if !text.is_empty() || wait.is_none() {
            return print(&text);
        }
        if Instant::now() >= deadline {
            bail!("no call was blocked in {} s", wait.unwrap_or(0));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn trace(sim: &Sim, toggle: Option<Toggle>) -> Result<()> {
    let path = sim.trace_path();
    let on = |on| {
        change(sim, None, |state, _| {
            state.control.trace = on;
            Ok(())
        })
    };
    match toggle {
        Some(Toggle::On) => on(true),
        Some(Toggle::Off) => on(false),
        Some(Toggle::Clear) => match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", path.display()))
            }
            _ => Ok(()),
        },
        None => match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            text => print(&text.with_context(|| format!("cannot read {}", path.display()))?),
        },
    }
}

fn list_models() -> String {
    let mut text = String::new();
    for model in catalogue::all() {
        let row = model.row();
        let mark = |verified: bool| if verified { "" } else { "  (unverified)" };
        text.push_str(&format!(
            "{:<16} {}, {} MiB, {} SM{}\n                 {}\n",
            row.key,
            row.product,
            row.memory_total_mib,
            row.multiprocessors,
            mark(row.verified),
            row.source
        ));
        for profile in row.mig.iter().flat_map(|mig| &mig.profiles) {
            text.push_str(&format!(
                "    {:<15} id {:<3} x{}  {:>6} MiB  {:>3} SM  at {:?}:{}{}\n",
                profile.name,
                profile.id,
                profile.instances,
                profile.memory_mib,
                profile.sm,
                profile.starts,
                profile.size,
                mark(profile.verified)
            ));
        }
    }
    text
}

/// Prints to stdout. A closed pipe is not an error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to stdout")
        }
        _ => Ok(()),
    }
}

impl Side {
    const fn when(&self) -> When {
        if self.after { When::After } else { When::Before }
    }
}
