//! Claims, templates and classes: configuration, capacities and counts.

use super::{Class, Finding, ONE_DAEMON, World, capacity, ours};
use crate::config::{AppliedConfig, ConfigError, DeviceConfig, Misfit, Source, effective, share_settings};
use crate::sharing::{Mode, Sharing};
use k8s_openapi::api::resource::v1::{DeviceClaim, DeviceClass, DeviceSelector, OpaqueDeviceConfiguration};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as WireQuantity;
use std::collections::{BTreeMap, BTreeSet};

/// A request, or one alternative of it, for devices that may be ours.
pub(super) struct Ask<'a> {
    /// `gpu`, or `gpu/big` for an alternative.
    pub(super) name: String,
    pub(super) base: &'a str,
    path: String,
    selectors: &'a [DeviceSelector],
    /// More than one device.
    many: bool,
    pub(super) admin: bool,
    amounts: Option<&'a BTreeMap<String, WireQuantity>>,
    class: Class,
    /// What its devices make of a GPU; not empty.
    pub(super) modes: BTreeSet<Mode>,
}

impl Ask<'_> {
    /// Whether its device of that mode is a share: it names a part of what a device
    /// deals out. That a part may be all of some device is not looked at: who
    /// wants that names nothing.
    pub(super) fn is_share(&self, mode: Mode) -> bool {
        mode.has_shares() && self.amounts.is_some_and(capacity::names_share)
    }
}

/// What a claim asks of our driver, as far as its classes are known.
pub(super) fn asks<'a>(claim: &'a DeviceClaim, path: &str, world: &dyn World) -> Vec<Ask<'a>> {
    let mut asks = Vec::new();
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
            let Some(class) = world.class(class).filter(|class| !class.modes.is_empty()) else { return };
            let selectors = selectors.as_deref().unwrap_or_default();
            let modes = world.narrow(class.modes.clone(), selectors);
            if !modes.is_empty() {
                let many = mode.as_deref() == Some("All") || count > Some(1);
                let base = request.name.as_str();
                asks.push(Ask { name, base, path, selectors, many, admin, amounts, class, modes });
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
    asks
}

/// A configuration of the claim for our driver.
struct Written<'a> {
    path: String,
    requests: &'a [String],
    config: Result<DeviceConfig, ConfigError>,
}

impl Written<'_> {
    /// As `AllocatedClaim` has it: by name, by the base of an alternative, or for all.
    fn applies(&self, ask: &Ask<'_>) -> Option<Source> {
        if self.requests.contains(&ask.name) {
            return Some(Source::Request);
        }
        let meant = self.requests.is_empty() || self.requests.iter().any(|name| name == ask.base);
        meant.then_some(Source::Claim)
    }
}

fn written<'a>(claim: &'a DeviceClaim, path: &str, texts: &[Option<&str>]) -> Vec<Written<'a>> {
    let configs = claim.config.iter().flatten().enumerate();
    let ours = configs.filter_map(|(index, config)| {
        let opaque = ours(config.opaque.as_ref())?;
        Some(Written {
            path: format!("{path}.config[{index}]"),
            requests: config.requests.as_deref().unwrap_or_default(),
            config: parse(opaque, texts.get(index).copied().flatten()),
        })
    });
    ours.collect()
}

fn parse(opaque: &OpaqueDeviceConfiguration, text: Option<&str>) -> Result<DeviceConfig, ConfigError> {
    text.map_or_else(|| DeviceConfig::from_value(&opaque.parameters.0), DeviceConfig::parse)
}

/// What holds for a request's device of a mode, if what was written can be read.
fn applied(ask: &Ask<'_>, written: &[Written<'_>]) -> Vec<AppliedConfig> {
    let of_class = ask.class.configs.iter().flatten().map(|config| (config, Source::Class));
    let of_claim = written.iter().filter_map(|one| Some((one.config.as_ref().ok()?, one.applies(ask)?)));
    let all = of_class.chain(of_claim);
    all.map(|(config, source)| AppliedConfig { config: config.clone(), source }).collect()
}

/// What a request has of a device of the mode: what it is set up with, or why it
/// cannot be.
fn fits(ask: &Ask<'_>, configs: &[AppliedConfig], mode: Mode) -> Result<Option<Sharing>, Misfit> {
    match ask.is_share(mode) {
        true => share_settings(configs).map(|_| None),
        false => effective(configs, mode),
    }
}

/// Whether processes of its devices are clients of an MPS control daemon, however
/// it is allocated.
pub(super) fn is_mps(claim: &DeviceClaim, ask: &Ask<'_>) -> bool {
    let configs = applied(ask, &written(claim, "", &[]));
    let mps =
        |mode: &Mode| *mode == Mode::Mps || matches!(fits(ask, &configs, *mode), Ok(Some(Sharing::Mps(_))));
    !ask.admin && ask.modes.iter().all(mps)
}

/// Whether it asks for a share.
pub(super) fn has_share(claim: &DeviceClaim, world: &dyn World) -> bool {
    let share = |ask: &Ask<'_>| !ask.admin && ask.modes.iter().any(|mode| ask.is_share(*mode));
    asks(claim, "", world).iter().any(share)
}

/// Whether all devices of these requests are on one GPU.
pub(super) fn on_one_gpu(claim: &DeviceClaim, asks: &[&Ask<'_>]) -> bool {
    const ONE_GPU: [&str; 2] = ["gpu.divvy.dev/uuid", "resource.kubernetes.io/pciBusID"];
    claim.constraints.iter().flatten().any(|constraint| {
        let requests = constraint.requests.as_deref().unwrap_or_default();
        let covers = |ask: &&Ask<'_>| requests.iter().any(|name| *name == ask.name || name == ask.base);
        constraint.match_attribute.as_deref().is_some_and(|attribute| ONE_GPU.contains(&attribute))
            && (requests.is_empty() || asks.iter().all(covers))
    })
}

/// Checks what a claim asks for. `texts` are the parameters of its configurations
/// as written, where they are at hand.
pub(super) fn check(
    claim: Option<&DeviceClaim>,
    path: &str,
    texts: &[Option<&str>],
    world: &dyn World,
) -> Vec<Finding> {
    let Some(claim) = claim else { return Vec::new() };
    let asks = asks(claim, path, world);
    let written = written(claim, path, texts);
    let mut findings = configs(claim, &asks, &written, world);
    for ask in &asks {
        findings.extend(
            ask.amounts.into_iter().flat_map(|amounts| capacity::check(amounts, &ask.modes, &ask.path)),
        );
        findings.extend(sharing(claim, ask, &written));
    }
    findings
}

/// What is wrong with configurations by themselves.
fn configs(
    claim: &DeviceClaim,
    asks: &[Ask<'_>],
    written: &[Written<'_>],
    world: &dyn World,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let requests = || claim.requests.iter().flatten();
    // An alternative that is not known to be ours may be what it is for.
    let classes = || {
        let exact = requests().flat_map(|request| &request.exactly).map(|one| &one.device_class_name);
        let alternatives = requests().flat_map(|request| request.first_available.iter().flatten());
        exact.chain(alternatives.map(|one| &one.device_class_name))
    };
    let all_known = classes().all(|class| world.class(class).is_some());
    for one in written {
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
            Err(cause) => findings.push(Finding::error(format!("{}.opaque.parameters", one.path), cause)),
            Ok(config) => {
                let useful = |ask: &Ask<'_>| match one.applies(ask) {
                    None => false,
                    // What does not fit is told by the request.
                    Some(Source::Request) => true,
                    Some(_) => ask.modes.iter().any(|mode| is_for(config, *mode, ask.is_share(*mode))),
                };
                if all_known && !asks.iter().any(useful) {
                    let message = format!("{} is for no device of this claim; remove it", config.kind());
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
        DeviceConfig::GpuConfig { .. } => mode == Mode::Whole && !share,
        DeviceConfig::MigDeviceConfig { .. } => mode == Mode::Mig && !share,
        DeviceConfig::ShareConfig(_) => share,
    }
}

/// What is wrong with what a request's devices are set up with.
fn sharing(claim: &DeviceClaim, ask: &Ask<'_>, written: &[Written<'_>]) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(cause) = ask.class.configs.iter().find_map(|config| config.as_ref().err()) {
        let message = format!("the configuration of its DeviceClass is refused: {cause}");
        findings.push(Finding::error(format!("{}.deviceClassName", ask.path), message));
    }
    if ask.admin {
        let message = "adminAccess looks on: no device is made or set up for it, and the scheduler finds no device on a GPU that somebody holds";
        findings.push(Finding::warning(format!("{}.adminAccess", ask.path), message));
        return findings;
    }
    let configs = applied(ask, written);
    let misfits: Vec<_> = ask.modes.iter().filter_map(|mode| fits(ask, &configs, *mode).err()).collect();
    if let Some(misfit) = misfits.first() {
        let path =
            written.iter().rev().find(|one| one.applies(ask) == Some(Source::Request)).map(|one| &one.path);
        let path = path.unwrap_or(&ask.path);
        // A selector may leave only the devices that it fits.
        let sure = misfits.len() == ask.modes.len() || ask.selectors.is_empty();
        let message = format!("request {}: {misfit}", ask.name);
        findings.push(if sure { Finding::error(path, message) } else { Finding::warning(path, message) });
    }
    if ask.class.part && !ask.amounts.is_some_and(capacity::names_share) {
        let message = format!(
            "request {}: its DeviceClass is for a part of a GPU; name memory or cores in capacity.requests, or use gpu.divvy.dev for all of it",
            ask.name
        );
        findings.push(Finding::error(&ask.path, message));
    }
    if ask.many && is_mps(claim, ask) && !(ask.modes == [Mode::Mps].into() && on_one_gpu(claim, &[ask])) {
        let message = format!("request {}: {ONE_DAEMON}", ask.name);
        findings.push(Finding::error(&ask.path, message));
    }
    findings
}

/// Checks a class.
pub(super) fn check_class(class: &DeviceClass, texts: &[Option<&str>], world: &dyn World) -> Vec<Finding> {
    let mut findings = Vec::new();
    let known = class.metadata.name.as_deref().and_then(|name| world.class(name));
    let modes = known.map(|known| known.modes).unwrap_or_default();
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
                let message = format!("{} is for no device of this class; remove it", config.kind());
                findings.push(Finding::warning(path, message));
            }
            Ok(_) => {}
        }
    }
    findings
}
