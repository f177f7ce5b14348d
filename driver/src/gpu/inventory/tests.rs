//! Presence, ownership and NVLink groups of GPUs.

use super::*;
use divvy_model::inventory::Origin;
use divvy_model::placement::Placement;
use divvy_nvml::{Fabric, GpuReading, RawInstance};
use std::sync::Arc;
use std::time::Instant;

fn uuid(gpu: u32) -> GpuUuid {
    format!("GPU-{gpu}").into()
}

fn bus(gpu: u32) -> String {
    format!("0000:{gpu:02x}:00.0")
}

/// A readable GPU with links to those GPUs; `None` while MIG mode hides them.
fn reads(gpu: u32, minor: u32, links: Option<&[u32]>, mig: RawMig) -> GpuReading {
    let description = Description {
        product: "NVIDIA H100".to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: "Hopper".to_owned(),
        compute_capability: (9, 0),
        memory_bytes: 80 << 30,
        addressing_mode: None,
        pci_bus_id: bus(gpu),
        toggle: MigToggle::Live,
        profiles: Ok(Vec::new()),
        links: links.map(|far| Links { gpus: far.iter().map(|far| bus(*far)).collect(), switch: None }),
    };
    GpuReading { uuid: uuid(gpu), reading: Ok((Arc::new(description), State { minor, mig })) }
}

fn plain(gpu: u32, minor: u32) -> GpuReading {
    reads(gpu, minor, Some(&[]), RawMig::Unsupported)
}

fn fails(gpu: u32, error: NvmlError) -> GpuReading {
    GpuReading { uuid: uuid(gpu), reading: Err(error) }
}

/// A node through several readings.
#[derive(Default)]
struct Node {
    numbers: GpuNumbers,
    pending: PendingOwnership,
    last: Inventory,
    /// GPUs with an instance in a record.
    named: BTreeSet<GpuUuid>,
}

impl Node {
    fn reads(&mut self, gpus: Vec<GpuReading>) -> &Inventory {
        self.reads_with(gpus, &|_, _, _| false)
    }

    /// The first reading.
    fn reads_with(&mut self, gpus: Vec<GpuReading>, ownership: &Ownership) -> &Inventory {
        self.reads_fresh(gpus, ownership, ReadScope::All)
    }

    fn reads_fresh(
        &mut self,
        gpus: Vec<GpuReading>,
        ownership: &Ownership,
        scope: ReadScope<'_>,
    ) -> &Inventory {
        let driver_version = "580.95.05".to_owned();
        let snapshot = Snapshot { driver_version, cuda_version: (13, 0), gpus, unreadable: Vec::new() };
        let listed = snapshot.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let pci = [(bus(0), PciFacts { pcie_root: Some("pci0000:00".to_owned()), numa_node: Some(1) })];
        self.last = inventory(
            &snapshot,
            &pci.into(),
            &mut self.numbers,
            self.pending.classify(ownership, scope),
            &|gpu| self.named.contains(gpu),
            &listed,
            &self.last,
        );
        &self.last
    }

    /// (number, GPU, minor, presence) of each GPU.
    fn rows(&self) -> Vec<(u32, String, u32, Presence)> {
        let row = |gpu: &Gpu| (gpu.number.0, gpu.uuid.to_string(), gpu.minor, gpu.presence);
        self.last.gpus.iter().map(row).collect()
    }

    /// (group, peers) of each GPU.
    fn links(&self) -> Vec<(Option<&str>, u32)> {
        self.last.gpus.iter().map(|gpu| (gpu.nvlink_group.as_deref(), gpu.nvlink_peers)).collect()
    }
}

fn row(number: u32, gpu: u32, minor: u32, presence: Presence) -> (u32, String, u32, Presence) {
    (number, uuid(gpu).to_string(), minor, presence)
}

#[test]
fn gpu_keeps_its_number_while_gpus_come_and_go() {
    use Presence::{Missing, Present};
    let mut node = Node::default();
    node.reads(vec![plain(0, 0), plain(1, 1), plain(2, 2)]);
    assert_eq!(node.rows(), [row(0, 0, 0, Present), row(1, 1, 1, Present), row(2, 2, 2, Present)]);
    node.reads(vec![plain(0, 0), plain(2, 1)]);
    assert_eq!(node.rows(), [row(0, 0, 0, Present), row(1, 1, 1, Missing), row(2, 2, 1, Present)]);
    node.reads(vec![plain(0, 0), plain(9, 1), plain(2, 2)]);
    assert_eq!(
        node.rows(),
        [row(0, 0, 0, Present), row(1, 1, 1, Missing), row(2, 2, 2, Present), row(3, 9, 1, Present)]
    );
    node.last = without_driver(&node.last, &BTreeSet::new());
    assert_eq!(node.last.driver_version, "");
    assert!(node.rows().iter().all(|row| row.3 == Missing));
    node.reads(vec![plain(0, 0), plain(1, 1), plain(2, 2), plain(9, 3)]);
    assert!(node.rows().iter().all(|row| row.3 == Present));
}

#[test]
fn unreadable_gpu_keeps_its_description_and_gets_a_condition() {
    let lost = NvmlError::Lost { call: "c", gpu: uuid(0) };
    let stuck = NvmlError::Stuck { call: "c", gpu: uuid(0), since: Instant::now() };
    let busy = NvmlError::Busy { call: "c", gpu: uuid(0), after: std::time::Duration::ZERO };
    let is_stuck = vec![finding(HealthState::Stuck, "c has not returned".to_owned())];
    let is_lost = vec![finding(HealthState::Lost, "c found no GPU".to_owned())];
    let mut node = Node::default();
    let healthy = node.reads(vec![plain(0, 0)]).gpus[0].clone();
    for (error, conditions) in
        [(busy.clone(), vec![]), (lost, is_lost), (stuck, is_stuck.clone()), (busy, is_stuck)]
    {
        let gpu = node.reads(vec![fails(0, error)]).gpus[0].clone();
        assert_eq!(gpu, Gpu { conditions, ..healthy.clone() });
    }
    assert_eq!(node.reads(vec![plain(0, 0)]).gpus, [healthy]);
    let unread = NvmlError::Lost { call: "c", gpu: uuid(7) };
    assert_eq!(node.reads(vec![plain(0, 0), fails(7, unread)]).gpus.len(), 1, "never described");
}

/// A GPU whose MIG facts cannot be read.
fn mig_unreadable(mode: Option<MigMode>) -> GpuReading {
    let cause = NvmlError::Call { call: "c", gpu: uuid(0), code: divvy_nvml::Code::Unknown };
    reads(0, 0, Some(&[]), RawMig::Unreadable { mode, cause })
}

#[test]
fn h8_gpu_with_unreadable_mig_facts_is_published_whole() {
    use divvy_model::health::TaintEffect;
    let effect = |gpu: &Gpu| {
        assert!(matches!(gpu.conditions[..], [Condition::MigUnreadable { .. }]), "{:?}", gpu.conditions);
        (gpu.effect(&gpu.conditions[0]), gpu.presence)
    };
    let free = (TaintEffect::None, Presence::Present);
    let tainted = (TaintEffect::NoSchedule, Presence::Present);
    for (mode, named, expected) in [
        (Some(MigMode::Off), false, free),
        (Some(MigMode::Off), true, tainted),
        (Some(MigMode::On), false, tainted),
        (None, false, tainted),
    ] {
        let mut node = Node::default();
        node.named.extend(named.then(|| uuid(0)));
        assert_eq!(effect(&node.reads(vec![mig_unreadable(mode)]).gpus[0]), expected, "{mode:?}");
        // The GPU becomes free as soon as the mode reads off and no record names an instance.
        node.named.clear();
        assert_eq!(effect(&node.reads(vec![mig_unreadable(Some(MigMode::Off))]).gpus[0]), free);
        assert_eq!(node.reads(vec![plain(0, 0)]).gpus[0].conditions, []);
    }
}

#[test]
fn h8_gpu_with_instances_keeps_its_last_mig_facts() {
    let instance = RawInstance {
        id: 7,
        profile_id: 19,
        placement: Placement { start: 0, size: 1 },
        compute_instances: Vec::new(),
    };
    let mig = RawMig::Supported { mode: MigMode::On, instances: vec![instance] };
    let mut reading = reads(0, 0, None, mig);
    if let Ok((description, _)) = &mut reading.reading {
        let profile = divvy_model::inventory::MigProfile {
            id: 19,
            index: 0,
            name: "1g.10gb".to_owned(),
            memory_mib: 9_984,
            multiprocessors: 16,
            copy_engines: 1,
            decoders: 1,
            encoders: 0,
            jpeg_engines: 1,
            ofa_engines: 0,
            max_instances: 7,
            placements: vec![Placement { start: 0, size: 1 }],
        };
        *description = Arc::new(Description { profiles: Ok(vec![profile]), ..(**description).clone() });
    }
    let mut node = Node::default();
    let before = node.reads_with(vec![reading.clone()], &|_, _, _| true).gpus[0].clone();
    for mode in [Some(MigMode::On), Some(MigMode::Off), None] {
        let gpu = &node.reads(vec![mig_unreadable(mode)]).gpus[0];
        assert_eq!(gpu.mig, before.mig);
        assert!(
            gpu.obstacle(None).is_some() && gpu.obstacle(Some(Placement { start: 0, size: 1 })).is_some()
        );
    }
    assert_eq!(node.reads_with(vec![reading], &|_, _, _| true).gpus[0], before);
}

#[test]
fn instance_with_a_record_is_ours() {
    let instance = |id, start| RawInstance {
        id,
        profile_id: 19,
        placement: Placement { start, size: 1 },
        compute_instances: Vec::new(),
    };
    let mig = RawMig::Supported { mode: MigMode::On, instances: vec![instance(7, 0), instance(9, 2)] };
    let mut node = Node::default();
    let ownership = |gpu: &GpuUuid, profile, start| (gpu, profile, start) == (&uuid(0), 19, 2);
    let gpu = &node.reads_with(vec![reads(0, 0, None, mig)], &ownership).gpus[0];
    let Mig::Supported { mode: MigMode::On, instances, .. } = &gpu.mig else { panic!("{:?}", gpu.mig) };
    let origins: Vec<_> = instances.iter().map(|instance| (instance.id, instance.origin)).collect();
    assert_eq!(origins, [(7, Origin::Foreign), (9, Origin::Ours)]);
    assert_eq!((gpu.pcie_root.as_deref(), gpu.numa_node), (Some("pci0000:00"), Some(1)));

    // A missing GPU has no instances, and on Hopper no MIG mode.
    let missing = without_driver(&node.last, &BTreeSet::new());
    let Mig::Supported { mode: MigMode::Off, instances, .. } = &missing.gpus[0].mig else {
        panic!("{missing:?}")
    };
    assert!(instances.is_empty());
    // While NVML is closed for an upgrade, a GPU that was read in this boot keeps its facts.
    let unread = without_driver(&node.last, &[uuid(0)].into());
    let expected = Gpu { presence: Presence::Unread, ..node.last.gpus[0].clone() };
    assert_eq!(unread.gpus, [expected]);
}

#[test]
fn h1_unreadable_gpu_of_another_boot_is_missing() {
    let mut node = Node::default();
    node.reads(vec![plain(0, 0), plain(1, 1)]);
    let stuck = NvmlError::Stuck { call: "c", gpu: uuid(0), since: Instant::now() };
    let snapshot = Snapshot {
        driver_version: "580.95.05".to_owned(),
        cuda_version: (13, 0),
        gpus: vec![fails(0, stuck), plain(1, 0)],
        unreadable: Vec::new(),
    };
    let none: &Ownership = &|_, _, _| false;
    node.last = inventory(
        &snapshot,
        &BTreeMap::new(),
        &mut node.numbers,
        node.pending.classify(none, ReadScope::All),
        &|_| false,
        &[uuid(1)].into(),
        &node.last,
    );
    assert_eq!(node.rows(), [row(0, 0, 0, Presence::Missing), row(1, 1, 0, Presence::Present)]);
    assert_eq!(node.last.gpus[0].health(), HealthState::Stuck);
}

/// An event for one instance and its record on GPU 0.
enum NodeEvent {
    /// GPU 0 or another GPU was read, or a reading begins, or the record changes; the instance is
    /// still shown.
    Read,
    ReadElsewhere,
    Begins,
    Recorded(bool),
    Gone,
}

#[test]
fn instance_without_record_during_a_whole_reading_is_foreign() {
    use NodeEvent::{Begins, Gone, Read, ReadElsewhere, Recorded};
    let (own, foreign) = (Origin::Ours, Origin::Foreign);
    // The instance starts as Divvy's with a record; the cases give the events and the owner at the end.
    let cases: &[(&[NodeEvent], Option<Origin>)] = &[
        (&[Begins, Recorded(false), Read], Some(own)),
        (&[Recorded(false), ReadElsewhere, ReadElsewhere], Some(own)),
        (&[Recorded(false), ReadElsewhere, Begins, ReadElsewhere], Some(own)),
        (&[Begins, Recorded(false), ReadElsewhere, Read], Some(own)),
        (&[Begins, Recorded(false), Read, Begins, Gone], None),
        (&[Begins, Recorded(false), Read, Recorded(true), Begins, Recorded(false), Read], Some(own)),
        (
            &[Begins, Recorded(false), Read, Begins, Recorded(true), ReadElsewhere, Recorded(false), Read],
            Some(own),
        ),
        (&[Begins, Recorded(false), Read, Begins, Read], Some(foreign)),
        (&[Recorded(false), ReadElsewhere, Begins, Read], Some(foreign)),
        (&[Recorded(false), ReadElsewhere, Begins, Read, ReadElsewhere], Some(foreign)),
        (&[Recorded(false), ReadElsewhere, Begins, Read, Recorded(true), ReadElsewhere], Some(own)),
    ];
    for (at, (event, want)) in cases.iter().enumerate() {
        let instance = RawInstance {
            id: 7,
            profile_id: 19,
            placement: Placement { start: 0, size: 1 },
            compute_instances: Vec::new(),
        };
        let mut recorded = true;
        let mut node = Node::default();
        let mut shown = vec![instance];
        let show = |shown: &[RawInstance]| {
            let mig = RawMig::Supported { mode: MigMode::On, instances: shown.to_vec() };
            vec![reads(0, 0, None, mig)]
        };
        node.reads_with(show(&shown), &|_, _, _| true);
        for event in event.iter() {
            let (gpu, other) = (uuid(0), uuid(1));
            let scope = match event {
                Recorded(now) => {
                    recorded = *now;
                    continue;
                }
                Begins => {
                    node.pending.reading_begins(&gpu, &move |_, _, _| recorded);
                    continue;
                }
                Gone => {
                    shown.clear();
                    ReadScope::Gpu(&gpu)
                }
                Read => ReadScope::Gpu(&gpu),
                ReadElsewhere => ReadScope::Gpu(&other),
            };
            node.reads_fresh(show(&shown), &move |_, _, _| recorded, scope);
        }
        let Mig::Supported { instances, .. } = &node.last.gpus[0].mig else { panic!("{at}") };
        assert_eq!(instances.first().map(|instance| instance.origin), *want, "case {at}");
        assert_eq!(node.pending.gpus().count(), usize::from(!recorded && *want == Some(own)), "case {at}");
    }
}

fn linked(gpu: u32, far: &[u32]) -> GpuReading {
    reads(gpu, gpu, Some(far), RawMig::Unsupported)
}

fn silenced(gpu: u32) -> GpuReading {
    reads(gpu, gpu, None, RawMig::Supported { mode: MigMode::On, instances: Vec::new() })
}

#[test]
fn gpus_connected_over_nvlink_are_a_group() {
    let mut node = Node::default();
    node.reads(vec![linked(0, &[1]), linked(1, &[0]), linked(2, &[]), linked(3, &[4]), linked(4, &[])]);
    let (one, other) = (Some("GPU-0"), Some("GPU-3"));
    assert_eq!(node.links(), [(one, 1), (one, 1), (None, 0), (other, 1), (other, 1)]);
    // A chain is one group, although not all its GPUs are neighbours.
    node.reads(vec![linked(0, &[1]), linked(1, &[0, 2]), linked(2, &[1])]);
    assert_eq!(node.links()[..3], [(one, 1), (one, 2), (one, 1)]);
    // A group keeps its name when its first GPU leaves, and two halves do not share a name.
    node.reads(vec![linked(0, &[]), linked(1, &[2]), linked(2, &[1])]);
    assert_eq!(node.links()[..3], [(None, 0), (one, 1), (one, 1)]);
    let mut node = Node::default();
    node.reads(vec![linked(0, &[1, 2, 3]), linked(1, &[]), linked(2, &[]), linked(3, &[])]);
    node.reads(vec![linked(0, &[1]), linked(1, &[]), linked(2, &[3]), linked(3, &[])]);
    assert_eq!(node.links(), [(one, 1), (one, 1), (Some("GPU-2"), 1), (Some("GPU-2"), 1)]);
}

#[test]
fn gpus_on_one_fabric_are_a_group() {
    let switched = |gpu, clique| {
        let mut reading = linked(gpu, &[]);
        if let Ok((description, _)) = &mut reading.reading {
            let switch = Some(Fabric { cluster: [7; 16], clique });
            let links = Some(Links { gpus: Vec::new(), switch });
            *description = Arc::new(Description { links, ..(**description).clone() });
        }
        reading
    };
    let mut node = Node::default();
    node.reads(vec![switched(0, 1), switched(1, 1), switched(2, 2), switched(3, 1)]);
    let group = Some("GPU-0");
    assert_eq!(node.links(), [(group, 2), (group, 2), (None, 0), (group, 2)]);
}

#[test]
fn mig_mode_hides_links_but_earlier_groups_stay() {
    let mut node = Node::default();
    node.reads(vec![linked(0, &[1]), linked(1, &[0])]);
    let group = (Some("GPU-0"), 1);
    node.reads(vec![silenced(0), linked(1, &[])]);
    assert_eq!(node.links(), [group, group]);
    node.reads(vec![fails(0, NvmlError::Lost { call: "c", gpu: uuid(0) }), linked(1, &[])]);
    assert_eq!(node.links()[0], group, "a lost GPU stays in its group");
    node.reads(vec![linked(0, &[]), linked(1, &[])]);
    assert_eq!(node.links(), [(None, 0), (None, 0)], "the bridge was removed");
}
