//! Requests for GPUs in the forms of other tools, and the claims that replace them.
//!
//! Admission, `divvy check` and `divvy import` use these functions, so their answers are equal. A
//! request without a size in bytes, such as half a GPU, needs a [`GpuSize`]. Memory of HAMi, Volcano
//! and KAI is in MiB per GPU. Sources: HAMi `pkg/device/nvidia/device.go`, Volcano
//! `pkg/scheduler/api/devices/nvidia/vgpu`, KAI `docs/gpu-sharing`, NVIDIA `k8s-device-plugin`.

use crate::config::{ConfigError, DeviceConfig};
use crate::names::{CONFIG_API_VERSION, DRIVER};
use crate::quantity::Quantity;
use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use k8s_openapi::api::resource::v1::{
    CELDeviceSelector, CapacityRequirements, DeviceClaim, DeviceClass, DeviceConstraint, DeviceRequest,
    DeviceSelector, ExactDeviceRequest, OpaqueDeviceConfiguration, ResourceClaimSpec, ResourceClaimTemplate,
    ResourceClaimTemplateSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as WireQuantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;

/// Extended resources of NVIDIA's device plugin, which HAMi shares.
pub const GPU: &str = "nvidia.com/gpu";
const GPU_SHARED: &str = "nvidia.com/gpu.shared";
const MIG_PREFIX: &str = "nvidia.com/mig-";
const HAMI: Names = Names {
    number: GPU,
    memory: "nvidia.com/gpumem",
    percentage: "nvidia.com/gpumem-percentage",
    cores: "nvidia.com/gpucores",
    other: &["nvidia.com/priority"],
};
const VOLCANO: Names = Names {
    number: "volcano.sh/vgpu-number",
    memory: "volcano.sh/vgpu-memory",
    percentage: "volcano.sh/vgpu-memory-percentage",
    cores: "volcano.sh/vgpu-cores",
    other: &[],
};
const KAI_MEMORY: &str = "gpu-memory";
const KAI_FRACTION: &str = "gpu-fraction";
const KAI_DEVICES: &str = "gpu-fraction-num-devices";
const KAI_CONTAINER: &str = "gpu-fraction-container-name";
/// Annotations of HAMi that choose GPUs. They have no counterpart that is as loose.
const HAMI_CHOICES: [&str; 4] = [
    "nvidia.com/use-gputype",
    "nvidia.com/nouse-gputype",
    "nvidia.com/use-gpuuuid",
    "nvidia.com/nouse-gpuuuid",
];
/// Schedulers that are only needed for these requests. A claim needs the default scheduler.
pub const SCHEDULERS: [&str; 3] = ["hami-scheduler", "kai-scheduler", "4pd-scheduler"];

/// The class of shares, and those of other devices.
const SHARE_CLASS: &str = "share.divvy.dev";
const GPU_CLASS: &str = "gpu.divvy.dev";
const MIG_CLASS: &str = "mig.divvy.dev";
const TIMESLICE_CLASS: &str = "timeslice.divvy.dev";
/// The request of a claim that [`Ported::devices`] writes.
const REQUEST: &str = "gpu";
const MIB: u64 = 1 << 20;
const ONE: i128 = 1_000_000_000;

/// The resources of a tool that divides GPUs by memory and compute time.
struct Names {
    number: &'static str,
    memory: &'static str,
    percentage: &'static str,
    cores: &'static str,
    other: &'static [&'static str],
}

/// The tool whose form a request has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    DevicePlugin,
    Hami,
    Volcano,
    Kai,
}

impl fmt::Display for Dialect {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::DevicePlugin => "NVIDIA's device plugin",
            Self::Hami => "HAMi",
            Self::Volcano => "Volcano",
            Self::Kai => "KAI",
        })
    }
}

/// The size of the GPUs that requests for a part of a GPU mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuSize {
    /// Bytes of one GPU.
    pub memory: u64,
    /// A class of shares of GPUs of this size; `None` for `share.divvy.dev`.
    pub class: Option<String>,
}

/// The request of one container in Divvy's terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ported {
    /// The DeviceClass.
    pub class: String,
    /// Devices, each on its own GPU; never 0.
    pub count: u32,
    /// Memory of each share. Without it, a share with `cores` takes all memory of the GPU.
    pub memory: Option<Quantity>,
    /// Percent of the compute time of each GPU, 1 to 100.
    pub cores: Option<u32>,
    /// The MIG profile, such as `1g.10gb`.
    pub profile: Option<String>,
}

/// Why a request cannot be replaced. Each message ends with the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error(
        "{name}: {value} is part of a GPU of unknown size; request memory instead, such as memory: 10Gi in \
         a claim of {SHARE_CLASS}, or name the size of the GPUs"
    )]
    SizeUnknown { name: String, value: String },
    #[error("{name} is {value:?}, expected {expected}; correct it")]
    Value { name: String, value: String, expected: &'static str },
    #[error("{first} and {second} exclude each other; remove one of them")]
    Both { first: String, second: String },
    #[error(
        "DeviceClass {class} of NVIDIA's driver has no counterpart in Divvy; keep NVIDIA's driver for it"
    )]
    Class { class: String },
    #[error("configuration {kind}: {cause}")]
    Config { kind: String, cause: ConfigError },
}

/// The request of a container in the form of another tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerRequest {
    pub dialect: Dialect,
    /// `spec.containers[0]` or `spec.initContainers[0]`.
    pub path: String,
    pub container: String,
    /// The extended resources that the claim replaces.
    pub resources: Vec<String>,
    /// The annotations of the pod that the claim replaces.
    pub annotations: Vec<String>,
    /// Divvy serves the pod unchanged, by classes with these extended resource names.
    pub served: bool,
    pub ported: Result<Ported, Refusal>,
    /// Settings that are lost, each with its replacement.
    pub notes: Vec<String>,
}

impl ContainerRequest {
    /// The request as the user wrote it, by name.
    pub fn names(&self) -> String {
        self.resources.iter().chain(&self.annotations).map(String::as_str).collect::<Vec<_>>().join(", ")
    }
}

/// The requests of a pod's containers in the forms of other tools. `size` is that of the GPUs, for
/// requests in parts of a GPU.
pub fn requests(pod: &Pod, size: Option<&GpuSize>) -> Vec<ContainerRequest> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let none = BTreeMap::new();
    let annotations = pod.metadata.annotations.as_ref().unwrap_or(&none);
    let init = spec.init_containers.iter().flatten().enumerate();
    let init = init.map(|(index, container)| (format!("spec.initContainers[{index}]"), container));
    let main = spec.containers.iter().enumerate();
    let main = main.map(|(index, container)| (format!("spec.containers[{index}]"), container));
    let kai = kai_container(annotations, &spec.containers);
    let mut found = Vec::new();
    for (path, container) in init.chain(main) {
        if kai == Some(container.name.as_str()) && path.starts_with("spec.containers") {
            found.push(of_kai(annotations, path.clone(), container, size));
        } else {
            found.extend(of_container(annotations, path, container, size));
        }
    }
    found
}

/// The container that KAI's annotations are for.
fn kai_container<'a>(
    annotations: &'a BTreeMap<String, String>,
    containers: &'a [Container],
) -> Option<&'a str> {
    let any = [KAI_MEMORY, KAI_FRACTION].iter().any(|name| annotations.contains_key(*name));
    let named = annotations.get(KAI_CONTAINER).map(String::as_str);
    any.then(|| named.or_else(|| Some(containers.first()?.name.as_str()))).flatten()
}

fn of_kai(
    annotations: &BTreeMap<String, String>,
    path: String,
    container: &Container,
    size: Option<&GpuSize>,
) -> ContainerRequest {
    let names = [KAI_MEMORY, KAI_FRACTION, KAI_DEVICES, KAI_CONTAINER];
    let names = names.into_iter().filter(|name| annotations.contains_key(*name)).map(str::to_owned);
    let resources: Vec<_> = [GPU].into_iter().filter(|name| amount_of(container, name).is_some()).collect();
    let ported = || {
        let (memory, fraction) = (annotations.get(KAI_MEMORY), annotations.get(KAI_FRACTION));
        if let (Some(_), Some(_)) = (memory, fraction) {
            return Err(both(KAI_MEMORY, KAI_FRACTION));
        }
        if let Some(resource) = resources.first() {
            return Err(both(memory.map_or(KAI_FRACTION, |_| KAI_MEMORY), resource));
        }
        let count = match annotations.get(KAI_DEVICES) {
            None => 1,
            Some(text) => whole(KAI_DEVICES, text, 1, u32::MAX.into())?,
        };
        match (memory, fraction) {
            (Some(memory), _) => {
                let memory = mebibytes(KAI_MEMORY, memory)?;
                Ok(Ported { count, memory: Some(memory), ..Ported::of(SHARE_CLASS) })
            }
            (None, Some(fraction)) => {
                let wrong = || Refusal::Value {
                    name: KAI_FRACTION.to_owned(),
                    value: fraction.clone(),
                    expected: "a number above 0 and up to 1, such as 0.5",
                };
                let part: Quantity = fraction.parse().map_err(|_| wrong())?;
                if !(1..=ONE).contains(&part.as_nano()) {
                    return Err(wrong());
                }
                part_of_gpu(KAI_FRACTION, fraction, part.as_nano(), None, count, size)
            }
            (None, None) => Err(Refusal::Value {
                name: KAI_FRACTION.to_owned(),
                value: String::new(),
                expected: "a number above 0 and up to 1, such as 0.5",
            }),
        }
    };
    ContainerRequest {
        dialect: Dialect::Kai,
        path,
        container: container.name.clone(),
        ported: ported(),
        resources: resources.into_iter().map(str::to_owned).collect(),
        annotations: names.collect(),
        served: false,
        notes: Vec::new(),
    }
}

fn of_container(
    annotations: &BTreeMap<String, String>,
    path: String,
    container: &Container,
    size: Option<&GpuSize>,
) -> Option<ContainerRequest> {
    let has = |name: &str| amount_of(container, name).is_some();
    let divides = |names: &Names| [names.memory, names.percentage, names.cores].iter().any(|name| has(name));
    let (dialect, names) = if divides(&HAMI) {
        (Dialect::Hami, Some(&HAMI))
    } else if divides(&VOLCANO) || has(VOLCANO.number) {
        (Dialect::Volcano, Some(&VOLCANO))
    } else {
        (Dialect::DevicePlugin, None)
    };
    let mut notes = Vec::new();
    let (resources, ported) = match names {
        Some(names) => {
            let all = [names.number, names.memory, names.percentage, names.cores];
            let all = all.into_iter().chain(names.other.iter().copied()).filter(|name| has(name));
            if names.other.iter().any(|name| has(name)) {
                notes.push(format!(
                    "{} is lost; the priority of a share is set in the ShareConfig of its DeviceClass",
                    names.other.join(", ")
                ));
            }
            (all.map(str::to_owned).collect(), divided(container, names, size))
        }
        None => {
            let limits = resources_of(container);
            let name = limits
                .iter()
                .find(|name| [GPU, GPU_SHARED].contains(&name.as_str()) || name.starts_with(MIG_PREFIX))?;
            (vec![name.clone()], of_device_plugin(container, name, size))
        }
    };
    for name in HAMI_CHOICES.iter().filter(|_| dialect != Dialect::DevicePlugin) {
        if annotations.contains_key(*name) {
            notes.push(format!("annotation {name} is lost; add a selector on productName or uuid"));
        }
    }
    let served = dialect == Dialect::DevicePlugin && is_whole(container, &resources);
    // A request for 0 GPUs asks for nothing.
    if matches!(&ported, Ok(ported) if ported.count == 0) {
        return None;
    }
    let container = container.name.clone();
    let annotations = Vec::new();
    Some(ContainerRequest { dialect, path, container, resources, annotations, served, ported, notes })
}

fn is_whole(container: &Container, resources: &[String]) -> bool {
    resources.iter().all(|name| {
        let amount = amount_of(container, name).and_then(|amount| amount.0.parse::<Quantity>().ok());
        amount.is_some_and(Quantity::is_whole)
    })
}

/// A request of HAMi or Volcano.
fn divided(container: &Container, names: &Names, size: Option<&GpuSize>) -> Result<Ported, Refusal> {
    let text = |name| amount_of(container, name).map(|amount| amount.0.as_str());
    // Both tools add one GPU if only a part is requested.
    let count = text(names.number).map_or(Ok(1), |text| whole(names.number, text, 0, u32::MAX.into()))?;
    let cores = text(names.cores).map(|text| whole(names.cores, text, 0, 100)).transpose()?;
    let cores = cores.filter(|cores| *cores > 0);
    let percentage = text(names.percentage).map(|text| whole(names.percentage, text, 0, 100)).transpose()?;
    let percentage = percentage.filter(|percentage| (1..100).contains(percentage));
    let memory = match text(names.memory) {
        // 0 is all memory, as without the resource.
        None | Some("0") => None,
        Some(text) => Some(mebibytes(names.memory, text)?),
    };
    match (memory, percentage, cores) {
        (Some(memory), _, cores) => {
            Ok(Ported { count, memory: Some(memory), cores, ..Ported::of(SHARE_CLASS) })
        }
        (None, Some(percentage), cores) => {
            let nano = ONE * i128::from(percentage) / 100;
            part_of_gpu(names.percentage, &percentage.to_string(), nano, cores, count, size)
        }
        (None, None, None | Some(100)) => Ok(Ported { count, ..Ported::of(GPU_CLASS) }),
        (None, None, cores) => Ok(Ported { count, cores, ..Ported::of(SHARE_CLASS) }),
    }
}

fn of_device_plugin(container: &Container, name: &str, size: Option<&GpuSize>) -> Result<Ported, Refusal> {
    let text = amount_of(container, name).map(|amount| amount.0.as_str()).unwrap_or_default();
    if let Some(profile) = name.strip_prefix(MIG_PREFIX) {
        let count = whole(name, text, 0, u32::MAX.into())?;
        return Ok(Ported { count, profile: Some(mig_profile(profile)), ..Ported::of(MIG_CLASS) });
    }
    let part = text.parse::<Quantity>().ok().map(Quantity::as_nano);
    match part {
        Some(nano) if name == GPU && (1..ONE).contains(&nano) => {
            // Half of the GPU is half of its memory and of its compute time.
            let cores = u32::try_from(nano * 100 / ONE).ok().filter(|cores| *cores > 0);
            part_of_gpu(name, text, nano, cores, 1, size)
        }
        _ => {
            let count = whole(name, text, 0, u32::MAX.into())?;
            let class = if name == GPU { GPU_CLASS } else { TIMESLICE_CLASS };
            Ok(Ported { count, ..Ported::of(class) })
        }
    }
}

/// The profile of a resource: NVIDIA's device plugin writes `+` as `.`.
pub fn mig_profile(resource: &str) -> String {
    match resource.split_once("gb.") {
        Some((size, attributes)) => format!("{size}gb+{attributes}"),
        None => resource.to_owned(),
    }
}

/// A share of a part of a GPU, in nano.
fn part_of_gpu(
    name: &str,
    value: &str,
    nano: i128,
    cores: Option<u32>,
    count: u32,
    size: Option<&GpuSize>,
) -> Result<Ported, Refusal> {
    if nano == ONE {
        return Ok(Ported { count, ..Ported::of(GPU_CLASS) });
    }
    let Some(size) = size else {
        return Err(Refusal::SizeUnknown { name: name.to_owned(), value: value.to_owned() });
    };
    let bytes = u64::try_from(i128::from(size.memory) * nano / ONE).unwrap_or_default();
    let memory = Quantity::bytes((bytes / MIB).max(1) * MIB);
    let class = size.class.clone().unwrap_or_else(|| SHARE_CLASS.to_owned());
    Ok(Ported { class, count, memory: Some(memory), cores, profile: None })
}

fn resources_of(container: &Container) -> Vec<String> {
    let lists = container.resources.iter().flat_map(|resources| [&resources.limits, &resources.requests]);
    lists.flatten().flat_map(BTreeMap::keys).cloned().collect()
}

/// An amount of the container; the limit if there are both.
fn amount_of<'a>(container: &'a Container, name: &str) -> Option<&'a WireQuantity> {
    let ResourceRequirements { limits, requests, .. } = container.resources.as_ref()?;
    limits.as_ref().and_then(|all| all.get(name)).or_else(|| requests.as_ref()?.get(name))
}

fn both(first: &str, second: &str) -> Refusal {
    Refusal::Both { first: first.to_owned(), second: second.to_owned() }
}

fn whole(name: &str, text: &str, least: u64, most: u64) -> Result<u32, Refusal> {
    let expected = if most == 100 { "a whole number up to 100" } else { "a whole number" };
    let wrong = || Refusal::Value { name: name.to_owned(), value: text.to_owned(), expected };
    let amount: Quantity = text.parse().map_err(|_| wrong())?;
    let amount = amount.is_whole().then(|| amount.as_bytes()).flatten().ok_or_else(wrong)?;
    if !(least..=most).contains(&amount) {
        return Err(wrong());
    }
    u32::try_from(amount).map_err(|_| wrong())
}

/// A number of MiB.
fn mebibytes(name: &str, text: &str) -> Result<Quantity, Refusal> {
    let expected = "a number of MiB without a unit, such as 10240 for 10 GiB";
    let wrong = || Refusal::Value { name: name.to_owned(), value: text.to_owned(), expected };
    let amount: Quantity = text.parse().map_err(|_| wrong())?;
    let mib = amount.is_whole().then(|| amount.as_bytes()).flatten().filter(|mib| *mib > 0);
    // More than a TiB is a number of bytes.
    let mib = mib.filter(|mib| *mib <= MIB).ok_or_else(wrong)?;
    Ok(Quantity::bytes(mib * MIB))
}

impl Ported {
    fn of(class: &str) -> Self {
        Self { class: class.to_owned(), count: 1, memory: None, cores: None, profile: None }
    }

    /// The devices of a claim for this request.
    pub fn devices(&self) -> DeviceClaim {
        let amounts = [
            self.memory.map(|memory| ("memory".to_owned(), memory.into())),
            self.cores.map(|cores| ("cores".to_owned(), Quantity::count(cores.into()).into())),
        ];
        let amounts: BTreeMap<String, WireQuantity> = amounts.into_iter().flatten().collect();
        let selector = self.profile.as_ref().map(|profile| DeviceSelector {
            cel: Some(CELDeviceSelector {
                expression: format!("device.attributes['{DRIVER}'].profile == '{profile}'"),
            }),
        });
        let exactly = ExactDeviceRequest {
            device_class_name: self.class.clone(),
            count: (self.count > 1).then_some(self.count.into()),
            selectors: selector.map(|selector| vec![selector]),
            capacity: (!amounts.is_empty()).then_some(CapacityRequirements { requests: Some(amounts) }),
            ..ExactDeviceRequest::default()
        };
        let request =
            DeviceRequest { name: REQUEST.to_owned(), exactly: Some(exactly), ..DeviceRequest::default() };
        // Two shares may be on one GPU otherwise.
        let shares = self.count > 1 && (self.memory.is_some() || self.cores.is_some());
        let distinct = shares.then(|| DeviceConstraint {
            distinct_attribute: Some(format!("{DRIVER}/uuid")),
            ..DeviceConstraint::default()
        });
        DeviceClaim {
            requests: Some(vec![request]),
            constraints: distinct.map(|distinct| vec![distinct]),
            ..DeviceClaim::default()
        }
    }

    /// A name for a template of this request: `share-3000mi-30`, `gpu-2`, `mig-1g.10gb`.
    pub fn name(&self) -> String {
        let kind = self.class.split('.').next().unwrap_or(REQUEST).to_owned();
        let profile = self.profile.as_ref().map(|profile| profile.replace('+', "."));
        let memory = self.memory.map(|memory| memory.to_string().to_ascii_lowercase());
        let cores = self.cores.map(|cores| cores.to_string());
        let count = (self.count > 1).then(|| format!("x{}", self.count));
        let parts = [Some(kind), profile, memory, cores, count];
        parts.into_iter().flatten().collect::<Vec<_>>().join("-")
    }

    /// A template with that name.
    pub fn template(&self, name: &str) -> ResourceClaimTemplate {
        let spec = ResourceClaimSpec { devices: Some(self.devices()) };
        ResourceClaimTemplate {
            metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
            spec: Some(ResourceClaimTemplateSpec {
                spec: Some(spec),
                ..ResourceClaimTemplateSpec::default()
            }),
        }
    }
}

/// Replaces the requests in a pod, or in the pod template of a workload (an object with `metadata`
/// and `spec`), by claims. `template` names the ResourceClaimTemplate of a request. Requests that
/// are refused stay as they are.
pub fn rewrite(pod: &mut Value, requests: &[ContainerRequest], template: &dyn Fn(&Ported) -> String) {
    for request in requests {
        let Ok(ported) = &request.ported else { continue };
        let template = template(ported);
        let claim = claim_name(pod);
        // Indexing would insert a null.
        let annotations = pod.pointer_mut("/metadata/annotations");
        if let Some(annotations) = annotations.and_then(Value::as_object_mut) {
            annotations.retain(|name, _| !request.annotations.contains(name));
            if annotations.is_empty()
                && let Some(metadata) = pod["metadata"].as_object_mut()
            {
                metadata.remove("annotations");
            }
        }
        let claims = &mut pod["spec"]["resourceClaims"];
        if claims.is_null() {
            *claims = json!([]);
        }
        if let Some(claims) = claims.as_array_mut() {
            claims.push(json!({"name": claim, "resourceClaimTemplateName": template}));
        }
        let Some(container) = container_at(pod, &request.path) else { continue };
        let resources = &mut container["resources"];
        for list in ["limits", "requests"] {
            if let Some(amounts) = resources.get_mut(list).and_then(Value::as_object_mut) {
                amounts.retain(|name, _| !request.resources.contains(name));
                if amounts.is_empty()
                    && let Some(resources) = resources.as_object_mut()
                {
                    resources.remove(list);
                }
            } else if let Some(resources) = resources.as_object_mut() {
                resources.remove(list);
            }
        }
        let claims = &mut resources["claims"];
        if claims.is_null() {
            *claims = json!([]);
        }
        if let Some(claims) = claims.as_array_mut() {
            claims.push(json!({"name": claim}));
        }
        if let Some(spec) = pod["spec"].as_object_mut()
            && spec
                .get("schedulerName")
                .and_then(Value::as_str)
                .is_some_and(|name| SCHEDULERS.contains(&name))
        {
            spec.remove("schedulerName");
        }
    }
}

/// A name that no claim of the pod has: `gpu`, `gpu-2`, ...
fn claim_name(pod: &Value) -> String {
    let taken = pod["spec"]["resourceClaims"].as_array().map_or(&[] as &[Value], Vec::as_slice);
    let is_free = |name: &String| !taken.iter().any(|claim| claim["name"] == name.as_str());
    let mut names =
        (1..).map(|n| if n == 1 { REQUEST.to_owned() } else { format!("{REQUEST}-{n}") }).filter(is_free);
    names.next().unwrap_or_default()
}

/// The container at `spec.containers[0]`.
fn container_at<'a>(pod: &'a mut Value, path: &str) -> Option<&'a mut Value> {
    let (list, index) = path.strip_prefix("spec.")?.split_once('[')?;
    let index: usize = index.strip_suffix(']')?.parse().ok()?;
    pod["spec"][list].get_mut(index).filter(|container| container.is_object())
}

/// The domain and driver of NVIDIA's DRA driver.
const NVIDIA: &str = "gpu.nvidia.com";
/// Its classes, and Divvy's. HAMi's DRA driver divides GPUs by the same capacities.
const CLASSES: [(&str, &str); 4] = [
    (NVIDIA, GPU_CLASS),
    ("mig.nvidia.com", MIG_CLASS),
    ("hami-gpu.project-hami.io", SHARE_CLASS),
    ("hami-core-gpu.project-hami.io", SHARE_CLASS),
];
/// Classes of NVIDIA's driver without a counterpart.
const OTHER_CLASSES: [&str; 4] = [
    "vfio.gpu.nvidia.com",
    "compute-domain-daemon.nvidia.com",
    "compute-domain-default-channel.nvidia.com",
    "compute-domain-channel.nvidia.com",
];
/// Drivers whose attributes have the same names under Divvy's domain.
const DRIVERS: [&str; 2] = ["hami-core-gpu.project-hami.io", NVIDIA];

/// Whether another driver's class has a counterpart; `None` for classes of unknown drivers.
pub fn counterpart(class: &str) -> Option<Result<&'static str, Refusal>> {
    if OTHER_CLASSES.contains(&class) {
        return Some(Err(Refusal::Class { class: class.to_owned() }));
    }
    CLASSES.iter().find(|(theirs, _)| *theirs == class).map(|(_, ours)| Ok(*ours))
}

/// Whether a claim names another driver's class or configures it.
pub fn is_foreign(claim: &DeviceClaim) -> bool {
    let requests = claim.requests.iter().flatten();
    let classes = requests.flat_map(|request| {
        let exact = request.exactly.iter().map(|one| &one.device_class_name);
        exact.chain(request.first_available.iter().flatten().map(|one| &one.device_class_name))
    });
    let configs = claim.config.iter().flatten().filter_map(|config| config.opaque.as_ref());
    classes.into_iter().any(|class| counterpart(class).is_some())
        || configs.into_iter().any(|opaque| DRIVERS.contains(&opaque.driver.as_str()))
}

/// The claim with Divvy's classes, attributes and configurations in place of another driver's.
///
/// # Errors
/// A class or a configuration has no counterpart.
pub fn port_claim(claim: &DeviceClaim) -> Result<DeviceClaim, Refusal> {
    let mut claim = claim.clone();
    for request in claim.requests.iter_mut().flatten() {
        if let Some(one) = &mut request.exactly {
            port_request(&mut one.device_class_name, one.selectors.as_mut())?;
        }
        for one in request.first_available.iter_mut().flatten() {
            port_request(&mut one.device_class_name, one.selectors.as_mut())?;
        }
    }
    for constraint in claim.constraints.iter_mut().flatten() {
        for attribute in
            [&mut constraint.match_attribute, &mut constraint.distinct_attribute].into_iter().flatten()
        {
            for driver in DRIVERS {
                if let Some(name) = attribute.strip_prefix(driver).and_then(|rest| rest.strip_prefix('/')) {
                    *attribute = format!("{DRIVER}/{name}");
                }
            }
        }
    }
    for config in claim.config.iter_mut().flatten() {
        if let Some(opaque) = &mut config.opaque {
            port_config(opaque)?;
        }
    }
    Ok(claim)
}

/// A class of another driver that selects Divvy's devices instead. The name stays, unless it is a
/// name of that driver's own classes.
///
/// # Errors
/// The class or a configuration has no counterpart.
pub fn port_class(class: &DeviceClass) -> Result<DeviceClass, Refusal> {
    let mut class = class.clone();
    if let Some(name) = &mut class.metadata.name
        && let Some(ours) = counterpart(name)
    {
        *name = ours?.to_owned();
    }
    if let Some(spec) = &mut class.spec {
        port_selectors(spec.selectors.as_mut());
        for config in spec.config.iter_mut().flatten() {
            if let Some(opaque) = &mut config.opaque {
                port_config(opaque)?;
            }
        }
    }
    Ok(class)
}

/// Whether a class selects or configures devices of another driver.
pub fn is_foreign_class(class: &DeviceClass) -> bool {
    port_class(class).map_or(true, |ported| ported != *class)
}

fn port_request(class: &mut String, selectors: Option<&mut Vec<DeviceSelector>>) -> Result<(), Refusal> {
    if let Some(ours) = counterpart(class) {
        *class = ours?.to_owned();
    }
    port_selectors(selectors);
    Ok(())
}

fn port_selectors(selectors: Option<&mut Vec<DeviceSelector>>) {
    for cel in selectors.into_iter().flatten().filter_map(|selector| selector.cel.as_mut()) {
        for driver in DRIVERS {
            cel.expression = cel.expression.replace(driver, DRIVER);
        }
        cel.expression = cel.expression.replace("'hami-gpu'", "'share'").replace("\"hami-gpu\"", "\"share\"");
    }
}

fn port_config(opaque: &mut OpaqueDeviceConfiguration) -> Result<(), Refusal> {
    if !DRIVERS.contains(&opaque.driver.as_str()) {
        return Ok(());
    }
    opaque.driver = DRIVER.to_owned();
    let parameters = &mut opaque.parameters.0;
    if let Some(version) = parameters.get_mut("apiVersion")
        && version.as_str().is_some_and(|version| version.starts_with("resource.nvidia.com/"))
    {
        *version = CONFIG_API_VERSION.into();
    }
    let kind = parameters["kind"].as_str().unwrap_or_default().to_owned();
    DeviceConfig::from_value(parameters).map_err(|cause| Refusal::Config { kind, cause })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(annotations: Value, limits: Value) -> Value {
        json!({"metadata": {"name": "p", "annotations": annotations}, "spec": {
            "schedulerName": "hami-scheduler",
            "containers": [{"name": "main", "image": "x", "resources": {"limits": limits}}]}})
    }

    /// The claim as `class count memory cores profile`, or the refusal.
    fn check(annotations: Value, limits: Value, size: Option<u64>, expected: &str) {
        let size = size.map(|gib| GpuSize { memory: gib << 30, class: None });
        let pod: Pod = serde_json::from_value(pod(annotations, limits.clone())).unwrap();
        let found = requests(&pod, size.as_ref());
        let shown = match found.first().map(|request| &request.ported) {
            None => "none".to_owned(),
            Some(Err(refusal)) => refusal.to_string(),
            Some(Ok(ported)) => {
                let memory = ported.memory.map(|memory| memory.to_string()).unwrap_or("-".to_owned());
                let cores = ported.cores.map(|cores| cores.to_string()).unwrap_or("-".to_owned());
                let profile = ported.profile.as_deref().unwrap_or("-");
                format!("{} {} {memory} {cores} {profile}", ported.class, ported.count)
            }
        };
        assert!(shown.starts_with(expected), "{limits}: {shown}");
    }

    #[test]
    fn requests_of_other_tools_become_claims() {
        let none = || json!({});
        let hami = |gpu: Value, mem: Value, cores: Value| {
            let all = [("nvidia.com/gpu", gpu), ("nvidia.com/gpumem", mem), ("nvidia.com/gpucores", cores)];
            all.into_iter().filter(|(_, value)| !value.is_null()).collect::<BTreeMap<_, _>>()
        };
        check(none(), json!(hami(1.into(), 3000.into(), 30.into())), None, "share.divvy.dev 1 3000Mi 30 -");
        check(none(), json!(hami(2.into(), "1024".into(), Value::Null)), None, "share.divvy.dev 2 1Gi - -");
        check(none(), json!(hami(Value::Null, 1.into(), 0.into())), None, "share.divvy.dev 1 1Mi - -");
        check(none(), json!(hami(1.into(), Value::Null, 30.into())), None, "share.divvy.dev 1 - 30 -");
        check(none(), json!(hami(1.into(), Value::Null, 100.into())), None, "gpu.divvy.dev 1 - - -");
        check(
            none(),
            json!(hami(1.into(), "10Gi".into(), Value::Null)),
            None,
            "nvidia.com/gpumem is \"10Gi\"",
        );
        check(none(), json!(hami(1.into(), 1.into(), 130.into())), None, "nvidia.com/gpucores is \"130\"");
        let half = json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 50});
        check(none(), half.clone(), Some(80), "share.divvy.dev 1 40Gi - -");
        check(none(), half, None, "nvidia.com/gpumem-percentage: 50 is part of a GPU of unknown size");
        let volcano = json!({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 2048,
            "volcano.sh/vgpu-cores": 25});
        check(none(), volcano, None, "share.divvy.dev 1 2Gi 25 -");
        check(json!({"gpu-memory": "4096"}), none(), None, "share.divvy.dev 1 4Gi - -");
        check(json!({"gpu-fraction": "0.25"}), none(), Some(40), "share.divvy.dev 1 10Gi - -");
        check(json!({"gpu-fraction": "0.5"}), none(), None, "gpu-fraction: 0.5 is part of a GPU");
        check(json!({"gpu-fraction": "2"}), none(), Some(40), "gpu-fraction is \"2\", expected");
        let both = json!({"gpu-fraction": "0.5", "gpu-memory": "100"});
        check(both, none(), None, "gpu-memory and gpu-fraction exclude each other");
        check(
            json!({"gpu-memory": "9"}),
            json!({"nvidia.com/gpu": 1}),
            None,
            "gpu-memory and nvidia.com/gpu",
        );
    }

    #[test]
    fn requests_of_the_device_plugin_become_claims() {
        let check = |limits, size, expected| check(json!({}), limits, size, expected);
        check(json!({"nvidia.com/gpu": 2}), None, "gpu.divvy.dev 2 - - -");
        check(json!({"nvidia.com/gpu": 0}), None, "none");
        check(json!({"nvidia.com/gpu": "500m"}), Some(80), "share.divvy.dev 1 40Gi 50 -");
        check(json!({"nvidia.com/gpu": 0.5}), None, "nvidia.com/gpu: 0.5 is part of a GPU");
        check(json!({"nvidia.com/gpu": 1.5}), None, "nvidia.com/gpu is \"1.5\", expected a whole number");
        check(json!({"nvidia.com/gpu.shared": 1}), None, "timeslice.divvy.dev 1 - - -");
        check(json!({"nvidia.com/mig-1g.10gb": 1}), None, "mig.divvy.dev 1 - - 1g.10gb");
        check(json!({"nvidia.com/mig-1g.10gb.me": 1}), None, "mig.divvy.dev 1 - - 1g.10gb+me");
        check(json!({"cpu": 1}), None, "none");
    }

    #[test]
    fn pod_is_rewritten_to_use_claims() {
        let limits = json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000, "cpu": 1});
        let mut value = pod(json!({"gpu-fraction-other": "x"}), limits);
        let requests = requests(&serde_json::from_value(value.clone()).unwrap(), None);
        rewrite(&mut value, &requests, &|_| "share-1".to_owned());
        let expected = json!({"metadata": {"name": "p", "annotations": {"gpu-fraction-other": "x"}}, "spec": {
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "share-1"}],
            "containers": [{"name": "main", "image": "x",
                "resources": {"limits": {"cpu": 1}, "claims": [{"name": "gpu"}]}}]}});
        assert_eq!(value, expected);
    }

    #[test]
    fn claims_of_nvidias_driver_are_ported() {
        let claim = json!({
            "requests": [{"name": "g", "exactly": {"deviceClassName": "mig.nvidia.com", "selectors": [
                {"cel": {"expression": "device.attributes['gpu.nvidia.com'].profile == '1g.10gb'"}}]}}],
            "constraints": [{"matchAttribute": "gpu.nvidia.com/parentUUID"}],
            "config": [{"opaque": {"driver": "gpu.nvidia.com", "parameters":
                {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "MigDeviceConfig"}}}]});
        let claim: DeviceClaim = serde_json::from_value(claim).unwrap();
        assert!(is_foreign(&claim));
        let ported = port_claim(&claim).unwrap();
        assert!(!is_foreign(&ported));
        let text = serde_json::to_string(&ported).unwrap();
        assert!(!text.contains("nvidia"), "{text}");
        let refused = |class: &str| {
            let claim = json!({"requests": [{"name": "g", "exactly": {"deviceClassName": class}}]});
            port_claim(&serde_json::from_value(claim).unwrap()).unwrap_err().to_string()
        };
        assert!(refused("vfio.gpu.nvidia.com").starts_with("DeviceClass vfio.gpu.nvidia.com"));
    }
}
