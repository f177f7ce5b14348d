//! Checks of claims, templates and classes: configuration, capacities and counts.

use super::capacity;
use super::published::nearest;
use super::types::{
    Class, ClusterView, Finding, ONE_DAEMON_PER_CONTAINER, class_names, class_of, meant_class, ours,
};
use crate::config::{
    self, AppliedConfig, ConfigError, ConfigMismatch, DeviceConfig, Source, effective, share_settings,
};
use crate::foreign;
use crate::names::{DRIVER, OBSERVER_CLASS, OBSERVER_TAINT};
use crate::sharing::{Mode, Sharing};
use k8s_openapi::api::resource::v1::{
    DeviceClaim, DeviceClass, DeviceSelector, DeviceToleration, OpaqueDeviceConfiguration,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as WireQuantity;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// A request, or one alternative of it, for devices that may be ours.
pub(super) struct DeviceRequest<'a> {
    /// `gpu`, or `gpu/big` for an alternative.
    pub(super) name: String,
    pub(super) base: &'a str,
    path: String,
    selectors: &'a [DeviceSelector],
    /// More than one device.
    pub(super) many: bool,
    pub(super) admin: bool,
    amounts: Option<&'a BTreeMap<String, WireQuantity>>,
    class: Class,
    /// The modes of its devices; not empty.
    pub(super) modes: BTreeSet<Mode>,
}

impl DeviceRequest<'_> {
    /// Whether its device of that mode is a share, or may be one, because it requests memory or cores. It
    /// does not matter that the amount may equal the whole device: a claim for a whole device sets
    /// neither.
    pub(super) fn is_share(&self, mode: Mode) -> bool {
        mode.has_shares() && self.amounts.is_some_and(capacity::requests_share)
    }
}

/// The requests of a claim for our driver, as far as its classes are known.
pub(super) fn requested<'a>(
    claim: &'a DeviceClaim,
    path: &str,
    view: &dyn ClusterView,
) -> Vec<DeviceRequest<'a>> {
    let mut requested = Vec::new();
    for (index, request) in claim.requests.iter().flatten().enumerate() {
        let path = format!("{path}.requests[{index}]");
        let mut add = |name,
                       path,
                       class: &str,
                       selectors: &'a Option<Vec<_>>,
                       mode: &Option<String>,
                       count,
                       admin,
                       amounts| {
            let Some(class) = class_of(view, class).filter(|class| !class.modes.is_empty()) else { return };
            let selectors = selectors.as_deref().unwrap_or_default();
            let modes = view.filter_modes(class.modes.clone(), selectors);
            if !modes.is_empty() {
                let many = mode.as_deref() == Some("All") || count > Some(1);
                let base = request.name.as_str();
                requested.push(DeviceRequest {
                    name,
                    base,
                    path,
                    selectors,
                    many,
                    admin,
                    amounts,
                    class,
                    modes,
                });
            }
        };
        if let Some(one) = &request.exactly {
            let amounts = one.capacity.as_ref().and_then(|capacity| capacity.requests.as_ref());
            let (name, path) = (request.name.clone(), format!("{path}.exactly"));
            let (mode, admin) = (&one.allocation_mode, one.admin_access == Some(true));
            add(name, path, &one.device_class_name, &one.selectors, mode, one.count, admin, amounts);
        }
        for (index, one) in request.first_available.iter().flatten().enumerate() {
            let amounts = one.capacity.as_ref().and_then(|capacity| capacity.requests.as_ref());
            let (name, path) =
                (format!("{}/{}", request.name, one.name), format!("{path}.firstAvailable[{index}]"));
            let mode = &one.allocation_mode;
            add(name, path, &one.device_class_name, &one.selectors, mode, one.count, false, amounts);
        }
    }
    requested
}

/// A configuration of the claim for our driver.
struct ClaimConfig<'a> {
    path: String,
    requests: &'a [String],
    parameters: &'a Value,
    config: Result<DeviceConfig, ConfigError>,
}

impl ClaimConfig<'_> {
    /// The source as in `AllocatedClaim`: by name, by the base of an alternative, or for all
    /// requests.
    fn applies(&self, request: &DeviceRequest<'_>) -> Option<Source> {
        if self.requests.contains(&request.name) {
            return Some(Source::Request);
        }
        let meant = self.requests.is_empty() || self.requests.iter().any(|name| name == request.base);
        meant.then_some(Source::Claim)
    }
}

fn claim_configs<'a>(claim: &'a DeviceClaim, path: &str, texts: &[Option<&str>]) -> Vec<ClaimConfig<'a>> {
    let configs = claim.config.iter().flatten().enumerate();
    let ours = configs.filter_map(|(index, config)| {
        let opaque = ours(config.opaque.as_ref())?;
        Some(ClaimConfig {
            path: format!("{path}.config[{index}]"),
            requests: config.requests.as_deref().unwrap_or_default(),
            parameters: &opaque.parameters.0,
            config: parse(opaque, texts.get(index).copied().flatten()),
        })
    });
    ours.collect()
}

fn parse(opaque: &OpaqueDeviceConfiguration, text: Option<&str>) -> Result<DeviceConfig, ConfigError> {
    text.map_or_else(|| DeviceConfig::from_value(&opaque.parameters.0), DeviceConfig::parse)
}

/// The valid configurations that apply to a request.
fn applied(request: &DeviceRequest<'_>, claim_configs: &[ClaimConfig<'_>]) -> Vec<AppliedConfig> {
    let of_class = request.class.configs.iter().flatten().map(|config| (config, Source::Class));
    let of_claim =
        claim_configs.iter().filter_map(|one| Some((one.config.as_ref().ok()?, one.applies(request)?)));
    let all = of_class.chain(of_claim);
    all.map(|(config, source)| AppliedConfig { config: config.clone(), source }).collect()
}

/// The sharing of a device of the mode, or why the configuration is not valid for it.
fn settings_for(
    request: &DeviceRequest<'_>,
    configs: &[AppliedConfig],
    mode: Mode,
) -> Result<Option<Sharing>, ConfigMismatch> {
    let of_share = || share_settings(configs).map(|_| None);
    match (mode, request.is_share(mode)) {
        // The node configuration decides whether it is a share of an instance or an instance.
        (Mode::Mig, true) => effective(configs, mode).or_else(|_| of_share()),
        (_, true) => of_share(),
        (_, false) => effective(configs, mode),
    }
}

/// Whether processes on its devices are clients of an MPS control daemon, for every allocation.
pub(super) fn is_mps(claim: &DeviceClaim, request: &DeviceRequest<'_>) -> bool {
    let configs = applied(request, &claim_configs(claim, "", &[]));
    let mps = |mode: &Mode| {
        *mode == Mode::Mps || matches!(settings_for(request, &configs, *mode), Ok(Some(Sharing::Mps(_))))
    };
    !request.admin && request.modes.iter().all(mps)
}

/// Whether the claim requests a share.
pub(super) fn has_share(claim: &DeviceClaim, view: &dyn ClusterView) -> bool {
    let share = |request: &DeviceRequest<'_>| {
        !request.admin && request.modes.iter().any(|mode| request.is_share(*mode))
    };
    requested(claim, "", view).iter().any(share)
}

/// Whether a constraint puts all devices of these requests on one GPU.
pub(super) fn on_one_gpu(claim: &DeviceClaim, requested: &[&DeviceRequest<'_>]) -> bool {
    const ONE_GPU: [&str; 2] = ["gpu.divvy.dev/uuid", "resource.kubernetes.io/pciBusID"];
    claim.constraints.iter().flatten().any(|constraint| {
        let requests = constraint.requests.as_deref().unwrap_or_default();
        let covers = |request: &&DeviceRequest<'_>| {
            requests.iter().any(|name| *name == request.name || name == request.base)
        };
        constraint.match_attribute.as_deref().is_some_and(|attribute| ONE_GPU.contains(&attribute))
            && (requests.is_empty() || requested.iter().all(covers))
    })
}

/// Checks the devices of a claim. `texts` are the parameters of its configurations as written, if
/// available.
pub(super) fn check(
    claim: Option<&DeviceClaim>,
    path: &str,
    texts: &[Option<&str>],
    view: &dyn ClusterView,
) -> Vec<Finding> {
    let Some(claim) = claim else { return Vec::new() };
    let requested = requested(claim, path, view);
    let claim_configs = claim_configs(claim, path, texts);
    let mut findings = classes(claim, path, view);
    findings.extend(configs(claim, path, &requested, &claim_configs, view));
    findings.extend(observers(claim, path));
    let gpus = view.gpus();
    for request in &requested {
        for (index, one) in request.selectors.iter().enumerate() {
            let Some(cel) = &one.cel else { continue };
            let path = format!("{}.selectors[{index}].cel.expression", request.path);
            findings.extend(selector(&cel.expression, &request.class.modes, &path, view));
        }
        findings.extend(
            request
                .amounts
                .into_iter()
                .flat_map(|amounts| capacity::check(amounts, &request.modes, &gpus, &request.path)),
        );
        findings.extend(sharing(claim, request, &claim_configs));
    }
    findings
}

/// The problems of a selector.
fn selector(expression: &str, modes: &BTreeSet<Mode>, path: &str, view: &dyn ClusterView) -> Vec<Finding> {
    let problems = view.selector_problems(expression, modes);
    let finding = |problem: super::published::SelectorProblem| Finding {
        severity: problem.severity,
        ..Finding::error(path, problem.message)
    };
    problems.into_iter().map(finding).collect()
}

/// Classes of other drivers, and classes that do not exist.
fn classes(claim: &DeviceClaim, path: &str, view: &dyn ClusterView) -> Vec<Finding> {
    let mut findings = Vec::new();
    let requests = claim.requests.iter().flatten().enumerate();
    let names =
        requests.flat_map(|(index, request)| class_names(request, &format!("{path}.requests[{index}]")));
    let (mut theirs, mut others) = (None, Vec::new());
    for (path, name) in names {
        // A cluster that has the class has its driver.
        if view.class(name).is_some() {
            continue;
        }
        if foreign::counterpart(name).is_some() {
            theirs.get_or_insert((path, name));
        } else {
            others.push((path, name));
        }
    }
    let named = theirs.is_some();
    let at = theirs.unwrap_or_else(|| (format!("{path}.config"), ""));
    let is_ours = claim.requests.iter().flatten().any(|request| {
        class_names(request, "")
            .into_iter()
            .any(|(_, name)| class_of(view, name).is_some_and(|class| !class.modes.is_empty()))
    });
    if named || (is_ours && foreign::is_foreign(claim)) {
        let (path, name) = at;
        let subject = match named {
            true => format!("DeviceClass {name} is of another driver"),
            false => "the configuration is for another driver".to_owned(),
        };
        let finding = match foreign::port_claim(claim) {
            Ok(ported) => {
                let instead = serde_json::json!({"devices": ported});
                Finding::error(
                    path,
                    format!("{subject}, which Divvy does not serve; write the claim for Divvy"),
                )
                .with(vec![instead])
            }
            Err(refusal) => Finding::error(path, format!("{subject}: {refusal}")),
        };
        findings.push(Finding { severity: view.other_driver(), ..finding });
    }
    for (path, name) in others {
        findings.extend(unknown_class(name, path, view));
    }
    findings.extend(profile_classes(claim, path, view));
    findings
}

fn unknown_class(name: &str, path: String, view: &dyn ClusterView) -> Option<Finding> {
    if name == OBSERVER_CLASS {
        return None;
    }
    if let Some(near) = meant_class(view, name) {
        let message = format!("there is no DeviceClass {name}; did you mean {near}?");
        // A short name may be a class of the administrator.
        let is_short = !name.contains('.');
        return Some(if is_short { Finding::warning(path, message) } else { Finding::error(path, message) });
    }
    let own = name.strip_suffix(".divvy.dev")?;
    let message = format!(
        "Divvy has no DeviceClass {name}; use gpu.divvy.dev, share.divvy.dev, mig.divvy.dev, \
         timeslice.divvy.dev or mps.divvy.dev, or define {own} as a class of your own"
    );
    Some(Finding::warning(path, message))
}

/// Classes of MIG profiles that no GPU has.
fn profile_classes(claim: &DeviceClaim, path: &str, view: &dyn ClusterView) -> Vec<Finding> {
    let profiles = view.profiles();
    if profiles.is_empty() {
        return Vec::new();
    }
    let requests = claim.requests.iter().flatten().enumerate();
    let names =
        requests.flat_map(|(index, request)| class_names(request, &format!("{path}.requests[{index}]")));
    let unknown = names.filter_map(|(path, name)| {
        let profile = name.strip_prefix("mig-")?.strip_suffix(".divvy.dev")?;
        Finding::unknown_profile(&foreign::mig_profile(profile), &profiles, path, &|near| {
            format!("mig-{}.divvy.dev", near.replace('+', "."))
        })
    });
    unknown.collect()
}

impl Finding {
    /// A profile that no GPU has; `write` gives the form in which the file names a profile.
    pub(super) fn unknown_profile(
        profile: &str,
        profiles: &BTreeSet<String>,
        path: String,
        write: &dyn Fn(&str) -> String,
    ) -> Option<Self> {
        if profiles.is_empty() || profiles.contains(profile) {
            return None;
        }
        let remedy = match nearest(profile, profiles.iter().map(String::as_str)) {
            Some(near) => format!("did you mean {}?", write(near)),
            None => "compare with `divvy template --gpus MODEL`".to_owned(),
        };
        Some(Self::error(path, format!("no known GPU has the MIG profile {profile}; {remedy}")))
    }
}

/// Problems of configurations alone.
fn configs(
    claim: &DeviceClaim,
    path: &str,
    requested: &[DeviceRequest<'_>],
    claim_configs: &[ClaimConfig<'_>],
    view: &dyn ClusterView,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let requests = || claim.requests.iter().flatten();
    // The configuration may be for an alternative whose class is unknown.
    let classes = || {
        let exact = requests().flat_map(|request| &request.exactly).map(|one| &one.device_class_name);
        let alternatives = requests().flat_map(|request| request.first_available.iter().flatten());
        exact.chain(alternatives.map(|one| &one.device_class_name))
    };
    let all_known = classes().all(|class| view.class(class).is_some());
    for (index, config) in claim.config.iter().flatten().enumerate() {
        let Some(opaque) = &config.opaque else { continue };
        let version = opaque.parameters.0["apiVersion"].as_str().unwrap_or_default();
        let is_near = strsim::jaro_winkler(&opaque.driver, DRIVER) > 0.9
            && foreign::counterpart(&opaque.driver).is_none();
        if opaque.driver != DRIVER && (is_near || version.starts_with("resource.divvy.dev/")) {
            let message = format!(
                "the configuration is for driver {}, so Divvy ignores it; did you mean {DRIVER}?",
                opaque.driver
            );
            findings.push(Finding::error(format!("{path}.config[{index}].opaque.driver"), message));
        }
    }
    for one in claim_configs {
        let unknown = |name: &&String| {
            !requests().any(|request| {
                let alternatives = request.first_available.iter().flatten();
                let mut alternatives = alternatives.map(|one| format!("{}/{}", request.name, one.name));
                request.name == **name || alternatives.any(|alternative| alternative == **name)
            })
        };
        if let Some(name) = one.requests.iter().find(unknown) {
            let message = format!("the claim has no request {name}; name one of its requests");
            findings.push(Finding::error(format!("{}.requests", one.path), message));
        }
        match &one.config {
            Err(cause) => {
                let path = format!("{}.opaque.parameters", one.path);
                findings.push(Finding::error(&path, cause));
                if let ConfigError::Field(first) = cause {
                    let others = config::faults(one.parameters).into_iter().filter(|fault| fault != first);
                    findings.extend(others.map(|fault| Finding::error(&path, fault)));
                }
            }
            Ok(config) => {
                let useful = |request: &DeviceRequest<'_>| match one.applies(request) {
                    None => false,
                    // A mismatch is reported at the request.
                    Some(Source::Request) => true,
                    Some(_) => {
                        request.modes.iter().any(|mode| is_for(config, *mode, request.is_share(*mode)))
                    }
                };
                if all_known && !requested.iter().any(useful) {
                    let message = format!("{} applies to no device of this claim; remove it", config.kind());
                    findings.push(Finding::warning(&one.path, message));
                }
            }
        }
    }
    findings
}

/// Whether a configuration is for devices of the mode, or for shares of them.
fn is_for(config: &DeviceConfig, mode: Mode, share: bool) -> bool {
    match config {
        DeviceConfig::GpuConfig { .. } => mode == Mode::Whole,
        DeviceConfig::MigDeviceConfig { .. } => mode == Mode::Mig,
        DeviceConfig::ShareConfig(_) => share,
    }
}

/// Problems of requests for devices that only observe. Their class has no mode, so [`requested`] leaves
/// them out.
fn observers(claim: &DeviceClaim, path: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, request) in claim.requests.iter().flatten().enumerate() {
        let path = format!("{path}.requests[{index}]");
        for (index, one) in request.first_available.iter().flatten().enumerate() {
            if one.device_class_name == OBSERVER_CLASS {
                let message = format!(
                    "an alternative cannot have adminAccess, which class {OBSERVER_CLASS} requires; use \
                     exactly"
                );
                let path = format!("{path}.firstAvailable[{index}].deviceClassName");
                findings.push(Finding::error(path, message));
            }
        }
        let Some(one) = request.exactly.as_ref().filter(|one| one.device_class_name == OBSERVER_CLASS) else {
            continue;
        };
        if one.admin_access != Some(true) {
            let message = format!(
                "class {OBSERVER_CLASS} is for monitoring; set adminAccess: true, in a namespace with the \
                 label resource.kubernetes.io/admin-access: \"true\""
            );
            findings.push(Finding::error(format!("{path}.exactly.adminAccess"), message));
        }
        if !one.tolerations.iter().flatten().any(tolerates_observer_taint) {
            let message = format!(
                "the scheduler gives a device of class {OBSERVER_CLASS} only to a request with the \
                 toleration {{key: {OBSERVER_TAINT}, operator: Exists}}; add it"
            );
            findings.push(Finding::error(format!("{path}.exactly.tolerations"), message));
        }
    }
    findings
}

/// Whether the toleration covers the taint of devices that only observe, which has no value and the
/// effect NoSchedule.
fn tolerates_observer_taint(toleration: &DeviceToleration) -> bool {
    let key = toleration.key.as_deref().unwrap_or_default();
    let exists = toleration.operator.as_deref() == Some("Exists");
    let no_value = toleration.value.as_deref().unwrap_or_default().is_empty();
    (key == OBSERVER_TAINT && (exists || no_value) || key.is_empty() && exists)
        && matches!(toleration.effect.as_deref(), None | Some("" | "NoSchedule"))
}

/// Problems of the configuration of a request's devices.
fn sharing(
    claim: &DeviceClaim,
    request: &DeviceRequest<'_>,
    claim_configs: &[ClaimConfig<'_>],
) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(cause) = request.class.configs.iter().find_map(|config| config.as_ref().err()) {
        let message = format!("the configuration of its DeviceClass is invalid: {cause}");
        findings.push(Finding::error(format!("{}.deviceClassName", request.path), message));
    }
    if request.admin {
        let message = format!(
            "adminAccess only observes: no device is created or configured for it, and the scheduler finds \
             no such device on a GPU that a claim holds; use class {OBSERVER_CLASS}, whose devices are \
             always free"
        );
        findings.push(Finding::warning(format!("{}.adminAccess", request.path), message));
        return findings;
    }
    let configs = applied(request, claim_configs);
    let misfits: Vec<_> =
        request.modes.iter().filter_map(|mode| settings_for(request, &configs, *mode).err()).collect();
    if let Some(misfit) = misfits.first() {
        let path = claim_configs
            .iter()
            .rev()
            .find(|one| one.applies(request) == Some(Source::Request))
            .map(|one| &one.path);
        let path = path.unwrap_or(&request.path);
        // A selector may leave only devices that match.
        let sure = misfits.len() == request.modes.len() || request.selectors.is_empty();
        let message = format!("request {}: {misfit}", request.name);
        findings.push(if sure { Finding::error(path, message) } else { Finding::warning(path, message) });
    }
    if let Ok(settings) = share_settings(&configs)
        && let Some(cores) = request.amounts.and_then(capacity::cores)
        && request.modes.iter().any(|mode| mode.has_shares())
        && configs
            .iter()
            .any(|one| matches!(&one.config, DeviceConfig::ShareConfig(config) if config.ceiling.is_some()))
        && i64::from(settings.ceiling) < cores
    {
        let ceiling = settings.ceiling;
        let message = format!(
            "request {}: the ceiling {ceiling} is below cores {cores}, so the share never gets more than \
             {ceiling} percent; raise the ceiling, or request cores: {ceiling}",
            request.name
        );
        findings.push(Finding::warning(&request.path, message));
    }
    if request.class.needs_share && !request.amounts.is_some_and(capacity::requests_share) {
        let message = format!(
            "request {}: its DeviceClass is for part of a GPU; set memory or cores in capacity.requests, or \
             use gpu.divvy.dev for a whole GPU",
            request.name
        );
        findings.push(Finding::error(&request.path, message));
    }
    if request.many
        && is_mps(claim, request)
        && !(request.modes == [Mode::Mps].into() && on_one_gpu(claim, &[request]))
    {
        let message = format!("request {}: {ONE_DAEMON_PER_CONTAINER}", request.name);
        findings.push(Finding::error(&request.path, message));
    }
    findings
}

/// Checks a DeviceClass.
pub(super) fn check_class(
    class: &DeviceClass,
    texts: &[Option<&str>],
    view: &dyn ClusterView,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let known = class.metadata.name.as_deref().and_then(|name| view.class(name));
    let modes = known.map(|known| known.modes).unwrap_or_default();
    let selectors = class.spec.iter().flat_map(|spec| spec.selectors.iter().flatten());
    let mentions_ours =
        selectors.clone().flat_map(|selector| &selector.cel).any(|cel| cel.expression.contains(DRIVER));
    if !mentions_ours && foreign::is_foreign_class(class) {
        let message = "the class is for another driver; use the class for Divvy instead";
        let finding = match foreign::port_class(class) {
            Ok(ported) => Finding::warning("spec", message).with(vec![serde_json::json!(ported)]),
            Err(refusal) => Finding::warning("spec", refusal),
        };
        findings.push(finding);
    } else if mentions_ours || class.metadata.name.as_deref().is_some_and(|name| name.ends_with(".divvy.dev"))
    {
        for (index, one) in selectors.enumerate() {
            let Some(cel) = &one.cel else { continue };
            let path = format!("spec.selectors[{index}].cel.expression");
            findings.extend(selector(&cel.expression, &BTreeSet::new(), &path, view));
        }
    }
    for (index, config) in class.spec.iter().flat_map(|spec| spec.config.iter().flatten()).enumerate() {
        let Some(opaque) = ours(config.opaque.as_ref()) else { continue };
        let path = format!("spec.config[{index}]");
        match parse(opaque, texts.get(index).copied().flatten()) {
            Err(cause) => findings.push(Finding::error(format!("{path}.opaque.parameters"), cause)),
            Ok(config)
                if !modes.is_empty()
                    && !modes.iter().any(|mode| {
                        let share = matches!(config, DeviceConfig::ShareConfig(_));
                        is_for(&config, *mode, share && mode.has_shares())
                    }) =>
            {
                let message = format!("{} applies to no device of this class; remove it", config.kind());
                findings.push(Finding::warning(path, message));
            }
            Ok(_) => {}
        }
    }
    findings
}
