//! Text map of the GPUs: their instances and holders.
//!
//! Each GPU is a bar with its memory slices to scale. The caller decides how holders are named: the
//! command line names processes.

use crate::state::{Gi, Gpu, State};
use std::fmt::Write;

/// Width of a bar in characters, between its outer walls.
const BAR_WIDTH: usize = 72;

/// Number of GPUs that are all drawn with short titles.
const ALL_GPUS_MAX: usize = 2;

/// A GPU, or one of its GPU instances.
#[derive(Clone, Copy, Debug)]
pub struct GpuPart<'a> {
    pub slot: usize,
    pub gpu: &'a Gpu,
    /// The GPU instance; absent for the whole GPU.
    pub gi: Option<&'a Gi>,
}

/// State of a cell, which determines how it is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CellState {
    Free,
    Instance,
    Held,
    Failed,
}

/// The holders of a GPU or of an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Held {
    /// One name for all of it.
    Whole(String),
    /// Holders of parts. The sizes and `of`, the size of the whole, have one unit.
    Parts { mode: String, parts: Vec<HeldPart>, of: u64 },
}

/// A part of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldPart {
    pub name: String,
    /// The part that it holds: `10 GiB`.
    pub what: String,
    pub size: u64,
}

impl Held {
    /// All holders in one line.
    fn line(&self) -> String {
        match self {
            Self::Whole(name) => name.clone(),
            Self::Parts { mode, parts, .. } => {
                let parts: Vec<String> =
                    parts.iter().map(|part| format!("{} {}", part.name, part.what)).collect();
                format!("{mode}: {}", parts.join(", "))
            }
        }
    }
}

/// Draws all GPUs with the names of the processes that run on them.
pub fn draw_gpus(state: &State, colour: bool) -> String {
    let mut text = String::new();
    for (slot, gpu) in state.gpus.iter().enumerate() {
        title(&mut text, state, slot, gpu);
        bar(&mut text, slot, gpu, colour, &|part| process_names(part).map(Held::Whole));
    }
    text
}

/// Draws GPUs with short titles. `holder` returns the holders of a part.
///
/// Of more than [`ALL_GPUS_MAX`] GPUs, those that are whole and free are only counted.
pub fn draw_gpus_with(state: &State, colour: bool, holder: &dyn Fn(GpuPart<'_>) -> Option<Held>) -> String {
    let is_free = |slot: usize, gpu: &Gpu| {
        let fails = gpu.missing || gpu.lost;
        !fails && !gpu.mig.current && holder(GpuPart { slot, gpu, gi: None }).is_none()
    };
    let is_short = state.gpus.len() > ALL_GPUS_MAX;
    let mut text = String::new();
    let mut free = 0;
    for (slot, gpu) in state.gpus.iter().enumerate() {
        if is_short && is_free(slot, gpu) {
            free += 1;
            continue;
        }
        let product = gpu.model().product.trim_start_matches("NVIDIA ");
        let _ = writeln!(text, "GPU {slot}  {product}{}", modes(gpu));
        bar(&mut text, slot, gpu, colour, holder);
    }
    match free {
        0 => {}
        1 => text.push_str("1 other GPU is whole and free\n"),
        _ if free == state.gpus.len() => text.push_str("All GPUs are whole and free\n"),
        _ => {
            let _ = writeln!(text, "{free} other GPUs are whole and free");
        }
    }
    text
}

/// Names of the processes that run on a part, and of the clients that hold it.
pub fn process_names(part: GpuPart<'_>) -> Option<String> {
    let inside = |gi: Option<u32>| part.gi.is_none_or(|part| gi == Some(part.id));
    let run = part.gpu.processes.iter().filter(|process| inside(process.instance.map(|(gi, _)| gi)));
    let hold = part.gpu.holders.iter().filter(|holder| inside(holder.gi));
    let names: Vec<String> = run
        .map(|process| format!("{} ({})", process.name, process.pid))
        .chain(hold.map(|holder| format!("{} ({}) holds it", holder.name, holder.pid)))
        .collect();
    (!names.is_empty()).then(|| names.join(", "))
}

fn title(text: &mut String, state: &State, slot: usize, gpu: &Gpu) {
    let place = match state.index_of_slot(slot) {
        Some(index) => format!("index {index}, minor {}", gpu.minor),
        None => "not listed".to_owned(),
    };
    let (product, bdf, modes) = (&gpu.model().product, &gpu.bdf, modes(gpu));
    // Writing to a String cannot fail. This also applies elsewhere.
    let _ = writeln!(text, "GPU {slot}  {product}  {bdf}  ({place}{modes})");
}

/// The modes of a GPU that differ from the default, each after a comma.
fn modes(gpu: &Gpu) -> String {
    let mig = match (gpu.model().mig.is_some(), gpu.mig.current, gpu.mig.pending) {
        (false, ..) => "",
        (_, true, true) => ", MIG on",
        (_, false, false) => ", MIG off",
        (_, true, false) => ", MIG on, off after a reset",
        (_, false, true) => ", MIG off, on after a reset",
    };
    let mode = match gpu.compute_mode {
        0 => "",
        2 => ", compute prohibited",
        _ => ", exclusive process",
    };
    let slice = match gpu.timeslice {
        0 => String::new(),
        level => format!(", time slice {}", timeslice(level)),
    };
    format!("{mig}{mode}{slice}")
}

/// A time slice as `nvidia-smi` names it.
pub(crate) const fn timeslice(level: u32) -> &'static str {
    match level {
        0 => "Default",
        1 => "Short",
        2 => "Medium",
        _ => "Long",
    }
}

fn bar(
    text: &mut String,
    slot: usize,
    gpu: &Gpu,
    colour: bool,
    holder: &dyn Fn(GpuPart<'_>) -> Option<Held>,
) {
    let part = |gi| GpuPart { slot, gpu, gi };
    let mut cells: Vec<(u64, String, CellState)> = Vec::new();
    let mut below = Vec::new();
    let whole = |label: &str, cell_state| vec![(1, label.to_owned(), cell_state)];
    if gpu.missing {
        cells = whole("missing since boot", CellState::Failed);
    } else if gpu.lost {
        cells = whole("fell off the bus", CellState::Failed);
    } else if let (true, Some(mig)) = (gpu.mig.current, &gpu.model().mig) {
        let mut next = 0;
        let mut sorted: Vec<&Gi> = gpu.instances.iter().collect();
        sorted.sort_by_key(|gi| gi.placement.start);
        for gi in sorted {
            cells.extend((next..gi.placement.start).map(|_| (1, String::new(), CellState::Free)));
            next = gi.placement.slices().end;
            let name = gpu.model().profile(gi.profile).map_or("?", |profile| &profile.name);
            let held = holder(part(Some(gi)));
            let cell_state = if held.is_some() { CellState::Held } else { CellState::Instance };
            cells.push((gi.placement.size.into(), name.to_owned(), cell_state));
            let cis = if gi.cis.len() == 1 {
                String::new()
            } else {
                format!(", {} compute instances", gi.cis.len())
            };
            below.push(format!(
                "  {name} at {} is GPU instance {}{cis}: {}",
                gi.placement,
                gi.id,
                held.map_or_else(|| "idle".to_owned(), |held| held.line())
            ));
        }
        cells.extend((next..mig.grid).map(|_| (1, String::new(), CellState::Free)));
    } else {
        match holder(part(None)) {
            None => cells = whole("whole and free", CellState::Free),
            Some(Held::Whole(name)) => cells = whole(&name, CellState::Held),
            Some(held @ Held::Parts { .. }) => {
                below.push(format!("  {}", held.line()));
                let Held::Parts { parts, of, .. } = held else { return };
                let held: u64 = parts.iter().map(|part| part.size).sum();
                cells = parts.into_iter().map(|part| (part.size, part.name, CellState::Held)).collect();
                if held < of {
                    cells.push((of - held, String::new(), CellState::Free));
                }
            }
        }
    }
    draw_cells(text, &cells, colour);
    for line in below {
        let _ = writeln!(text, "{line}");
    }
}

/// Draws one line of cells, with widths in proportion to their sizes.
fn draw_cells(text: &mut String, cells: &[(u64, String, CellState)], colour: bool) {
    let total = cells.iter().map(|(size, ..)| *size).sum::<u64>().max(1);
    let column = |size: u64| ((2 * size * BAR_WIDTH as u64 + total) / (2 * total)) as usize;
    let (mut before, mut start) = (0, 0);
    text.push_str("  ");
    for (size, label, cell_state) in cells {
        before += size;
        // One column of each cell is its wall.
        let end = column(before).max(start + 2);
        let width = end - start - 1;
        start = end;
        let (fill, code) = match cell_state {
            CellState::Free => ('.', "2"),
            CellState::Instance => (' ', "36"),
            CellState::Held => ('#', "32"),
            CellState::Failed => ('!', "31"),
        };
        let label: String = label.chars().take(width).collect();
        let label =
            if label.is_empty() || label.chars().count() + 2 > width { label } else { format!(" {label} ") };
        let pad = width - label.chars().count();
        let inner: String = std::iter::once(fill).take(pad.min(1)).chain(label.chars()).collect::<String>()
            + &fill.to_string().repeat(pad.saturating_sub(1));
        if colour {
            let _ = write!(text, "|\x1b[{code}m{inner}\x1b[0m");
        } else {
            let _ = write!(text, "|{inner}");
        }
    }
    text.push_str("|\n");
}
