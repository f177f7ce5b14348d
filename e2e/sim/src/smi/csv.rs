//! `nvidia-smi --query-gpu`: chosen fields, a line per GPU.

use super::Selected;
use super::library::{Nvml, Smi, SmiError};
use super::query::{MIB, compute_mode, mib, on_off};

/// `--query-gpu=index,uuid,... --format=csv[,noheader][,nounits]`.
pub(super) fn csv(nvml: &Nvml, gpus: &[Selected], fields: &str, format: &str) -> Smi<()> {
    let fields: Vec<&str> = fields.split(',').map(str::trim).collect();
    let units = !format.split(',').any(|part| part.trim() == "nounits");
    if !format.split(',').any(|part| part.trim() == "noheader") {
        let names: Vec<String> = fields
            .iter()
            .map(|field| {
                if field.starts_with("memory.") && units {
                    format!("{field} [MiB]")
                } else {
                    (*field).to_owned()
                }
            })
            .collect();
        println!("{}", names.join(", "));
    }
    for gpu in gpus {
        let values: Smi<Vec<String>> = fields.iter().map(|field| value(nvml, gpu, field, units)).collect();
        println!("{}", values?.join(", "));
    }
    Ok(())
}

fn value(nvml: &Nvml, gpu: &Selected, field: &str, units: bool) -> Smi<String> {
    let size = |bytes: u64| if units { mib(bytes) } else { (bytes / MIB).to_string() };
    let mode = |pick: fn((u32, u32)) -> u32| {
        nvml.mig_mode(gpu.handle).map_or("[N/A]".to_owned(), |mode| on_off(pick(mode)).to_owned())
    };
    Ok(match field {
        "index" => gpu.index.to_string(),
        "uuid" | "gpu_uuid" => nvml.uuid(gpu.handle)?,
        "name" | "gpu_name" => nvml.name(gpu.handle)?,
        "serial" | "gpu_serial" => nvml.serial(gpu.handle)?,
        "count" => nvml.count()?.to_string(),
        "driver_version" => nvml.driver_version()?,
        "pci.bus_id" | "gpu_bus_id" => nvml.pci(gpu.handle)?.bus_id(),
        "memory.total" => size(nvml.memory(gpu.handle)?.total),
        "memory.used" => size(nvml.memory(gpu.handle)?.used),
        "memory.free" => size(nvml.memory(gpu.handle)?.free),
        "memory.reserved" => size(nvml.memory(gpu.handle)?.reserved),
        "mig.mode.current" => mode(|(current, _)| current),
        "mig.mode.pending" => mode(|(_, pending)| pending),
        "compute_mode" => compute_mode(nvml.number("nvmlDeviceGetComputeMode", gpu.handle)?).to_owned(),
        "persistence_mode" => on_off(nvml.number("nvmlDeviceGetPersistenceMode", gpu.handle)?).to_owned(),
        _ => return Err(SmiError::Usage(format!("Field \"{field}\" is not a valid field to query."))),
    })
}
