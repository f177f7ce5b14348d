//! A node with one GPU, and claims for its devices as text.

use super::*;

/// The GPU, the holdings on it, and whether Divvy enabled its MIG mode.
#[derive(Clone)]
pub(super) struct NodeFixture {
    pub(super) gpu: Gpu,
    pub(super) held: Vec<Holding>,
    pub(super) debts: Vec<Debt>,
    pub(super) mig_enabled: BTreeSet<GpuUuid>,
    pub(super) removals: Removals,
}

pub(super) const HOPPER: MigToggle = MigToggle::Live;
pub(super) const AMPERE: MigToggle = MigToggle::NeedsReset;

pub(super) fn uuid() -> GpuUuid {
    "GPU-a".into()
}

pub(super) fn profile(id: u32, name: &str, size: u32, starts: &[u32]) -> MigProfile {
    MigProfile {
        id,
        index: id,
        name: name.into(),
        memory_mib: 9856,
        multiprocessors: 16,
        copy_engines: 1,
        decoders: 1,
        encoders: 0,
        jpeg_engines: 1,
        ofa_engines: 0,
        max_instances: starts.len() as u32,
        placements: starts.iter().map(|start| Placement { start: *start, size }).collect(),
    }
}

pub(super) fn node(toggle: MigToggle, mode: MigMode) -> NodeFixture {
    let profiles = vec![
        profile(19, "1g.10gb", 1, &[0, 1, 2, 3, 4, 5, 6]),
        profile(20, "1g.10gb+me", 1, &[0, 1, 2, 3, 4, 5, 6]),
        profile(9, "3g.40gb", 4, &[0, 4]),
    ];
    let gpu = Gpu {
        number: GpuNumber(0),
        uuid: uuid(),
        minor: 0,
        product: "GPU".into(),
        brand: "Nvidia".into(),
        architecture: "Hopper".into(),
        compute_capability: (9, 0),
        memory_bytes: 80 << 30,
        addressing_mode: None,
        pci_bus_id: "0000:1a:00.0".into(),
        pcie_root: None,
        numa_node: None,
        nvlink_group: None,
        nvlink_peers: 0,
        mig: Mig::Supported { mode, toggle, profiles, instances: Vec::new() },
        presence: Presence::Present,
        conditions: Vec::new(),
        policy: Default::default(),
    };
    let removals = Removals::default();
    NodeFixture { gpu, held: Vec::new(), debts: Vec::new(), mig_enabled: BTreeSet::new(), removals }
}

pub(super) fn key(profile_id: u32, start: u32, size: u32) -> InstanceKey {
    InstanceKey { gpu: uuid(), profile_id, placement: Placement { start, size } }
}

impl NodeFixture {
    pub(super) fn held(self, claim: &str, part: Part) -> Self {
        self.held_as(claim, part, Access::Exclusive(None), true)
    }

    pub(super) fn held_as(self, claim: &str, part: Part, access: Access, ready: bool) -> Self {
        let made = match &part {
            Part::Whole { .. } => Vec::new(),
            Part::Instance(key) => {
                vec![Undo::DestroyGpuInstance(key.clone()), Undo::DestroyComputeInstances(key.clone())]
            }
        };
        self.made(claim, part, access, ready, made)
    }

    pub(super) fn made(
        mut self,
        claim: &str,
        part: Part,
        access: Access,
        ready: bool,
        made: Vec<Undo>,
    ) -> Self {
        let claim = ClaimRef { namespace: "ns".into(), name: claim.into(), uid: claim.into() };
        self.held.push(Holding { claim, part, access, ready, made });
        self
    }

    /// Adds another claim with a share of `gib` GiB of the part.
    pub(super) fn share(self, part: Part, gib: u64, ready: bool) -> Self {
        let limits = ShareLimits { memory: gib << 30, cores: 0, settings: Default::default() };
        self.held_as("other", part, Access::Share(limits), ready)
    }

    /// Adds another prepared claim that shares the whole GPU with this setup.
    pub(super) fn shared(self, setup: Setup) -> Self {
        self.held_as("other", Part::Whole { gpu: uuid() }, Access::Shared(setup), true)
    }

    pub(super) fn instance(
        mut self,
        origin: Origin,
        profile_id: u32,
        start: u32,
        size: u32,
        computes: u32,
    ) -> Self {
        if let Mig::Supported { instances, .. } = &mut self.gpu.mig {
            let compute_instances = (0..computes)
                .map(|id| ComputeInstance { id, profile_id: 0, uuid: format!("MIG-{id}") })
                .collect();
            let placement = Placement { start, size };
            instances.push(GpuInstance { id: 7, profile_id, placement, compute_instances, origin });
        }
        self
    }
}

/// Plans a claim for these devices. The prefixes `admin:` and `share:` select the kind of access;
/// a suffix `=10Gi` or `=10Gi,30` gives the consumed memory and cores.
pub(super) fn planned(node: &NodeFixture, devices: &str) -> Result<Plan, PlanError> {
    configured(node, devices, &[])
}

/// The same with these configurations for every device.
pub(super) fn configured(
    node: &NodeFixture,
    devices: &str,
    configs: &[AppliedConfig],
) -> Result<Plan, PlanError> {
    let device = |text: &str| {
        let (hold, name) = match text.split_once(':') {
            Some(("admin", name)) => (Hold::Admin { id: Some("s".into()) }, name),
            Some((_, name)) => {
                let (name, amounts) = name.split_once('=').unwrap_or((name, ""));
                let amounts = amounts.split_terminator(',').map(|amount| amount.parse().unwrap());
                let consumed = ["memory", "cores"].map(str::to_owned).into_iter().zip(amounts).collect();
                (Hold::Share { id: ShareId::from("s"), consumed }, name)
            }
            None => (Hold::Exclusive, text),
        };
        let (pool, name) = name.split_once('/').unwrap_or(("node", name));
        AllocatedDevice {
            request: "r".into(),
            chosen: "r".into(),
            pool: pool.into(),
            device: name.into(),
            class: None,
            hold,
            configs: configs.to_vec(),
        }
    };
    let claim = AllocatedClaim {
        claim: ClaimRef { namespace: "ns".into(), name: "me".into(), uid: "me".into() },
        pod_claim: None,
        devices: devices.split_whitespace().map(device).collect(),
    };
    let inventory =
        Inventory { gpus: vec![node.gpu.clone()], removals: node.removals.clone(), ..Inventory::default() };
    let pool = PoolName::from("node");
    plan(
        &claim,
        View {
            pool: &pool,
            inventory: &inventory,
            held: &node.held,
            debts: &node.debts,
            mig_enabled: &node.mig_enabled,
        },
    )
}

/// Checks the steps, and the undo steps in the order in which they run.
#[track_caller]
pub(super) fn check(node: &NodeFixture, devices: &str, steps: &[&str], undo: &[&str]) {
    check_plan(&planned(node, devices).unwrap(), steps, undo);
}

#[track_caller]
pub(super) fn check_plan(plan: &Plan, steps: &[&str], undo: &[&str]) {
    let short = |text: String| text.replace("GPU instance of profile ", "").replace(" on GPU-a", "");
    let have: Vec<String> = plan.steps.iter().map(|step| short(step.to_string())).collect();
    let back: Vec<String> = plan.undo().iter().rev().map(|undo| short(undo.to_string())).collect();
    assert_eq!((have, back), (owned(steps), owned(undo)));
}

pub(super) fn owned(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

#[track_caller]
pub(super) fn check_refused(node: &NodeFixture, devices: &str, because: &str) {
    let error = planned(node, devices).unwrap_err().to_string();
    assert!(error.contains(because), "{error}");
    assert!(error.contains("ns/me"), "the message names the claim: {error}");
}
