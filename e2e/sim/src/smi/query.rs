//! `nvidia-smi -L`, `-q` as text and XML, `--query-gpu`, and the table.

use super::nvml::{Handle, Nvml, Selected, Smi, SmiError};

pub(super) const MIB: u64 = 1 << 20;
const NA: &str = "N/A";

/// `nvidia-smi -L`.
pub(super) fn list(nvml: &Nvml, gpus: &[Selected]) -> Smi<()> {
    for gpu in gpus {
        println!("GPU {}: {} (UUID: {})", gpu.index, nvml.name(gpu.handle)?, nvml.uuid(gpu.handle)?);
        for (index, device) in nvml.mig_devices(gpu.handle)?.into_iter().enumerate() {
            let (profile, uuid) = (profile(nvml, device)?, nvml.uuid(device)?);
            println!("  MIG {profile:<11} Device {index:>2}: (UUID: {uuid})");
        }
    }
    Ok(())
}

/// The part of a MIG device's name after `MIG`.
fn profile(nvml: &Nvml, device: Handle) -> Smi<String> {
    let name = nvml.name(device)?;
    Ok(name.rsplit_once("MIG ").map_or(name.clone(), |(_, profile)| profile.to_owned()))
}

/// The table that is printed without arguments: one line for each GPU, MIG device and process.
pub(super) fn table(nvml: &Nvml, gpus: &[Selected]) -> Smi<()> {
    let line = "+-----------------------------------------------------------------------------------------+";
    let print = |text: String| println!("|{text:<89}|");
    println!("{line}");
    let driver = nvml.driver_version()?;
    print(format!(
        " NVIDIA-SMI {driver:<22} Driver Version: {driver:<14} CUDA Version: {}",
        nvml.cuda_version()?
    ));
    println!("{line}");
    for gpu in gpus {
        let memory = nvml.memory(gpu.handle)?;
        let mig = match nvml.mig_mode(gpu.handle) {
            Ok((0, _)) => "Disabled",
            Ok(_) => "Enabled",
            Err(_) => NA,
        };
        print(format!(
            " {:>3}  {:<30} {}  {:>6}MiB / {:>6}MiB  MIG {mig}",
            gpu.index,
            nvml.name(gpu.handle)?,
            nvml.pci(gpu.handle)?.bus_id(),
            memory.used / MIB,
            memory.total / MIB
        ));
        for device in nvml.mig_devices(gpu.handle)? {
            let memory = nvml.memory(device)?;
            print(format!(
                "      MIG {:<16} GI {:>2}  CI {:>2}             {:>6}MiB / {:>6}MiB",
                profile(nvml, device)?,
                nvml.number("nvmlDeviceGetGpuInstanceId", device)?,
                nvml.number("nvmlDeviceGetComputeInstanceId", device)?,
                memory.used / MIB,
                memory.total / MIB
            ));
        }
    }
    println!("{line}");
    print(" Processes:".to_owned());
    for gpu in gpus {
        for process in
            nvml.processes("nvmlDeviceGetComputeRunningProcesses_v3", gpu.handle).unwrap_or_default()
        {
            let id = |id: u32| if id == u32::MAX { NA.to_owned() } else { id.to_string() };
            print(format!(
                " {:>3}  {:>4} {:>4} {:>8}  C  {:<40} {:>6}MiB",
                gpu.index,
                id(process.gi),
                id(process.ci),
                process.pid,
                nvml.process_name(process.pid).unwrap_or_default(),
                process.used / MIB
            ));
        }
    }
    println!("{line}");
    Ok(())
}

/// A line or section of `-q`.
enum Item {
    /// XML tag, label, value.
    Field(&'static str, &'static str, String),
    /// XML tag with attributes, label, content.
    Section(String, String, Vec<Item>),
}

fn field(tag: &'static str, label: &'static str, value: impl Into<String>) -> Item {
    Item::Field(tag, label, value.into())
}

fn section(tag: &str, label: &str, items: Vec<Item>) -> Item {
    Item::Section(tag.to_owned(), label.to_owned(), items)
}

/// `nvidia-smi -q`, as XML or text.
pub(super) fn query(nvml: &Nvml, gpus: &[Selected], xml: bool) -> Smi<()> {
    let mut items = vec![
        field("driver_version", "Driver Version", nvml.driver_version()?),
        field("cuda_version", "CUDA Version", nvml.cuda_version()?),
        field("attached_gpus", "Attached GPUs", nvml.count()?.to_string()),
    ];
    for gpu in gpus {
        let bus_id = nvml.pci(gpu.handle)?.bus_id();
        items.push(Item::Section(
            format!("gpu id=\"{bus_id}\""),
            format!("GPU {bus_id}"),
            gpu_items(nvml, gpu.handle)?,
        ));
    }
    if xml {
        println!("<?xml version=\"1.0\" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM \"nvsmi_device_v12.dtd\">");
        print_xml(&[Item::Section("nvidia_smi_log".to_owned(), String::new(), items)], 0);
    } else {
        println!("\n==============NVSMI LOG==============\n");
        print_text(&items, 0);
    }
    Ok(())
}

fn gpu_items(nvml: &Nvml, gpu: Handle) -> Smi<Vec<Item>> {
    let pci = nvml.pci(gpu)?;
    let (current, pending) = match nvml.mig_mode(gpu) {
        Ok((current, pending)) => (on_off(current), on_off(pending)),
        Err(_) => (NA, NA),
    };
    let mut devices = Vec::new();
    for (index, device) in nvml.mig_devices(gpu)?.into_iter().enumerate() {
        devices.push(section("mig_device", "MIG Device", mig_device_items(nvml, device, index)?));
    }
    if devices.is_empty() {
        devices.push(field("", "", "None"));
    }
    let one = |name| nvml.number(name, gpu);
    let watts = |name| one(name).map_or(NA.to_owned(), |mw| format!("{}.{:02} W", mw / 1000, mw % 1000 / 10));
    let (util, memory_util) = match nvml.utilization(gpu) {
        Ok([gpu, memory]) => (format!("{gpu} %"), format!("{memory} %")),
        Err(_) => (NA.to_owned(), NA.to_owned()),
    };
    Ok(vec![
        field("product_name", "Product Name", nvml.name(gpu)?),
        field("product_brand", "Product Brand", brand(one("nvmlDeviceGetBrand")?)),
        field(
            "product_architecture",
            "Product Architecture",
            architecture(one("nvmlDeviceGetArchitecture")?),
        ),
        field("persistence_mode", "Persistence Mode", on_off(one("nvmlDeviceGetPersistenceMode")?)),
        section(
            "mig_mode",
            "MIG Mode",
            vec![field("current_mig", "Current", current), field("pending_mig", "Pending", pending)],
        ),
        section("mig_devices", "MIG Devices", devices),
        field("serial", "Serial Number", nvml.serial(gpu)?),
        field("uuid", "GPU UUID", nvml.uuid(gpu)?),
        field("minor_number", "Minor Number", one("nvmlDeviceGetMinorNumber")?.to_string()),
        field("vbios_version", "VBIOS Version", nvml.vbios(gpu)?),
        section(
            "pci",
            "PCI",
            vec![
                field("pci_bus", "Bus", format!("0x{:02X}", pci.bus)),
                field("pci_device", "Device", format!("0x{:02X}", pci.device)),
                field("pci_domain", "Domain", format!("0x{:04X}", pci.domain)),
                field("pci_device_id", "Device Id", format!("0x{:08X}", pci.device_id)),
                field("pci_bus_id", "Bus Id", pci.bus_id()),
                field("pci_sub_system_id", "Sub System Id", format!("0x{:08X}", pci.subsystem_id)),
            ],
        ),
        memory(nvml, gpu)?,
        bar1(nvml, gpu)?,
        field("compute_mode", "Compute Mode", compute_mode(one("nvmlDeviceGetComputeMode")?)),
        section(
            "utilization",
            "Utilization",
            vec![field("gpu_util", "GPU", util), field("memory_util", "Memory", memory_util)],
        ),
        section(
            "temperature",
            "Temperature",
            vec![field(
                "gpu_temp",
                "GPU Current Temp",
                nvml.number_of("nvmlDeviceGetTemperature", gpu, 0)
                    .map_or(NA.to_owned(), |degrees| format!("{degrees} C")),
            )],
        ),
        section(
            "gpu_power_readings",
            "GPU Power Readings",
            vec![
                field("instant_power_draw", "Instantaneous Power Draw", watts("nvmlDeviceGetPowerUsage")),
                field(
                    "current_power_limit",
                    "Current Power Limit",
                    watts("nvmlDeviceGetPowerManagementLimit"),
                ),
            ],
        ),
        processes(nvml, gpu),
    ])
}

fn mig_device_items(nvml: &Nvml, device: Handle, index: usize) -> Smi<Vec<Item>> {
    let one = |name| nvml.number(name, device).map(|number| number.to_string());
    let has = nvml.attributes(device)?;
    let count = |tag, label, count: u32| field(tag, label, count.to_string());
    Ok(vec![
        field("index", "Index", index.to_string()),
        field("gpu_instance_id", "GPU Instance ID", one("nvmlDeviceGetGpuInstanceId")?),
        field("compute_instance_id", "Compute Instance ID", one("nvmlDeviceGetComputeInstanceId")?),
        section(
            "device_attributes",
            "Device Attributes",
            vec![section(
                "shared",
                "Shared",
                vec![
                    count("multiprocessor_count", "Multiprocessor count", has.sm),
                    count("copy_engine_count", "Copy Engine count", has.ce),
                    count("encoder_count", "Encoder count", has.enc),
                    count("decoder_count", "Decoder count", has.dec),
                    count("ofa_count", "OFA count", has.ofa),
                    count("jpg_count", "JPG count", has.jpg),
                ],
            )],
        ),
        memory(nvml, device)?,
        bar1(nvml, device)?,
    ])
}

fn memory(nvml: &Nvml, device: Handle) -> Smi<Item> {
    let memory = nvml.memory(device)?;
    Ok(section(
        "fb_memory_usage",
        "FB Memory Usage",
        vec![
            field("total", "Total", mib(memory.total)),
            field("reserved", "Reserved", mib(memory.reserved)),
            field("used", "Used", mib(memory.used)),
            field("free", "Free", mib(memory.free)),
        ],
    ))
}

fn bar1(nvml: &Nvml, device: Handle) -> Smi<Item> {
    let bar1 = nvml.bar1(device)?;
    Ok(section(
        "bar1_memory_usage",
        "BAR1 Memory Usage",
        vec![
            field("total", "Total", mib(bar1.total)),
            field("used", "Used", mib(bar1.used)),
            field("free", "Free", mib(bar1.free)),
        ],
    ))
}

fn processes(nvml: &Nvml, gpu: Handle) -> Item {
    let kinds = [
        ("nvmlDeviceGetComputeRunningProcesses_v3", "C"),
        ("nvmlDeviceGetGraphicsRunningProcesses_v3", "G"),
        ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "M+C"),
    ];
    let id = |id: u32| if id == u32::MAX { NA.to_owned() } else { id.to_string() };
    let mut items = Vec::new();
    for (call, kind) in kinds {
        for process in nvml.processes(call, gpu).unwrap_or_default() {
            items.push(section(
                "process_info",
                "Process",
                vec![
                    field("gpu_instance_id", "GPU instance ID", id(process.gi)),
                    field("compute_instance_id", "Compute instance ID", id(process.ci)),
                    field("pid", "Process ID", process.pid.to_string()),
                    field("type", "Type", kind),
                    field("process_name", "Name", nvml.process_name(process.pid).unwrap_or_default()),
                    field("used_memory", "Used GPU Memory", mib(process.used)),
                ],
            ));
        }
    }
    section("processes", "Processes", items)
}

fn print_xml(items: &[Item], depth: usize) {
    let indent = "\t".repeat(depth);
    for item in items {
        match item {
            Item::Field("", _, value) => println!("{indent}{value}"),
            Item::Field(tag, _, value) => println!("{indent}<{tag}>{}</{tag}>", escaped(value)),
            Item::Section(tag, _, items) => {
                println!("{indent}<{tag}>");
                print_xml(items, depth + 1);
                println!("{indent}</{}>", tag.split(' ').next().unwrap_or(tag));
            }
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn print_text(items: &[Item], depth: usize) {
    let indent = " ".repeat(depth * 4);
    let width = 50_usize.saturating_sub(depth * 4);
    for item in items {
        match item {
            Item::Field("", _, value) => println!("{indent}{value}"),
            Item::Field(_, label, value) => println!("{indent}{label:<width$}: {value}"),
            Item::Section(_, label, items) => {
                println!("{indent}{label}");
                print_text(items, depth + 1);
            }
        }
    }
}

pub(super) fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes / MIB)
}

pub(super) const fn on_off(mode: u32) -> &'static str {
    if mode == 0 { "Disabled" } else { "Enabled" }
}

const fn brand(number: u32) -> &'static str {
    match number {
        1 => "Quadro",
        2 => "Tesla",
        5 => "GeForce",
        12 => "Quadro RTX",
        13 => "NVIDIA RTX",
        14 => "NVIDIA",
        15 => "GeForce RTX",
        _ => "Unknown",
    }
}

const fn architecture(number: u32) -> &'static str {
    match number {
        5 => "Volta",
        6 => "Turing",
        7 => "Ampere",
        8 => "Ada Lovelace",
        9 => "Hopper",
        10 => "Blackwell",
        _ => "Unknown",
    }
}

pub(super) const fn compute_mode(mode: u32) -> &'static str {
    match mode {
        0 => "Default",
        1 => "Exclusive_Thread",
        2 => "Prohibited",
        _ => "Exclusive_Process",
    }
}

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
