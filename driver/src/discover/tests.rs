//! What becomes of each GPU, and who reaches whom.

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

/// A readable GPU with links to those GPUs; none at all while MIG silences them.
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
        profiles: Vec::new(),
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

/// A node over several readings, with its numbers.
#[derive(Default)]
struct Node {
    numbers: GpuNumbers,
    doubts: Doubts,
    last: Inventory,
}

impl Node {
    fn reads(&mut self, gpus: Vec<GpuReading>) -> &Inventory {
        self.reads_with(gpus, &|_, _, _| false)
    }

    /// At the start.
    fn reads_with(&mut self, gpus: Vec<GpuReading>, ours: &Ours) -> &Inventory {
        self.reads_fresh(gpus, ours, Fresh::All)
    }

    fn reads_fresh(&mut self, gpus: Vec<GpuReading>, ours: &Ours, fresh: Fresh<'_>) -> &Inventory {
        let driver_version = "580.95.05".to_owned();
        let snapshot = Snapshot { driver_version, cuda_version: (13, 0), gpus, unreadable: Vec::new() };
        let pci = [(bus(0), PciFacts { pcie_root: Some("pci0000:00".to_owned()), numa_node: Some(1) })];
        self.last =
            inventory(&snapshot, &pci.into(), &mut self.numbers, self.doubts.judge(ours, fresh), &self.last);
        &self.last
    }

    /// (number, GPU, minor, presence) of each.
    fn rows(&self) -> Vec<(u32, String, u32, Presence)> {
        let row = |gpu: &Gpu| (gpu.number.0, gpu.uuid.to_string(), gpu.minor, gpu.presence);
        self.last.gpus.iter().map(row).collect()
    }

    /// (group, peers) of each.
    fn links(&self) -> Vec<(Option<&str>, u32)> {
        self.last.gpus.iter().map(|gpu| (gpu.nvlink_group.as_deref(), gpu.nvlink_peers)).collect()
    }
}

fn row(number: u32, gpu: u32, minor: u32, presence: Presence) -> (u32, String, u32, Presence) {
    (number, uuid(gpu).to_string(), minor, presence)
}

#[test]
fn a_gpu_keeps_its_number_when_another_is_gone_and_comes_back() {
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
    node.last = without_driver(&node.last);
    assert_eq!(node.last.driver_version, "");
    assert!(node.rows().iter().all(|row| row.3 == Missing));
    node.reads(vec![plain(0, 0), plain(1, 1), plain(2, 2), plain(9, 3)]);
    assert!(node.rows().iter().all(|row| row.3 == Present));
}

#[test]
fn a_gpu_that_cannot_be_read_keeps_its_description_and_says_why() {
    let lost = NvmlError::Lost { call: "c", gpu: uuid(0) };
    let stuck = NvmlError::Stuck { call: "c", gpu: uuid(0), since: Instant::now() };
    let busy = NvmlError::Busy { call: "c", gpu: uuid(0), after: std::time::Duration::ZERO };
    let is_stuck = vec![Condition::Stuck { call: "c".to_owned() }];
    let mut node = Node::default();
    let well = node.reads(vec![plain(0, 0)]).gpus[0].clone();
    for (error, conditions) in
        [(busy.clone(), vec![]), (lost, vec![Condition::Lost]), (stuck, is_stuck.clone()), (busy, is_stuck)]
    {
        let gpu = node.reads(vec![fails(0, error)]).gpus[0].clone();
        assert_eq!(gpu, Gpu { conditions, ..well.clone() });
    }
    assert_eq!(node.reads(vec![plain(0, 0)]).gpus, [well]);
    let unheard = NvmlError::Lost { call: "c", gpu: uuid(7) };
    assert_eq!(node.reads(vec![plain(0, 0), fails(7, unheard)]).gpus.len(), 1, "never described");
}

#[test]
fn an_instance_is_ours_where_a_record_explains_it() {
    let instance = |id, start| RawInstance {
        id,
        profile_id: 19,
        placement: Placement { start, size: 1 },
        compute_instances: Vec::new(),
    };
    let mig = RawMig::Supported { mode: MigMode::On, instances: vec![instance(7, 0), instance(9, 2)] };
    let mut node = Node::default();
    let ours = |gpu: &GpuUuid, profile, start| (gpu, profile, start) == (&uuid(0), 19, 2);
    let gpu = &node.reads_with(vec![reads(0, 0, None, mig)], &ours).gpus[0];
    let Mig::Supported { mode: MigMode::On, instances, .. } = &gpu.mig else { panic!("{:?}", gpu.mig) };
    let origins: Vec<_> = instances.iter().map(|instance| (instance.id, instance.origin)).collect();
    assert_eq!(origins, [(7, Origin::Foreign), (9, Origin::Ours)]);
    assert_eq!((gpu.pcie_root.as_deref(), gpu.numa_node), (Some("pci0000:00"), Some(1)));

    // Gone, it has no instances, and Hopper's mode is gone with the driver.
    let gone = without_driver(&node.last);
    let Mig::Supported { mode: MigMode::Off, instances, .. } = &gone.gpus[0].mig else { panic!("{gone:?}") };
    assert!(instances.is_empty());
}

/// What happens to one instance and its record on GPU 0.
enum Happens {
    /// GPU 0 was read, or another one, or records changed; the instance is still shown.
    Read,
    ReadElsewhere,
    Begins,
    Recorded(bool),
    Gone,
}

#[test]
fn an_instance_becomes_foreign_only_when_read_without_a_record_from_begin_to_end() {
    use Happens::{Begins, Gone, Read, ReadElsewhere, Recorded};
    let (own, foreign) = (Origin::Ours, Origin::Foreign);
    // From an instance of ours with a record: what happens, and whose it is in the end.
    let cases: &[(&[Happens], Option<Origin>)] = &[
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
    for (at, (happens, want)) in cases.iter().enumerate() {
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
        for happens in happens.iter() {
            let (gpu, other) = (uuid(0), uuid(1));
            let fresh = match happens {
                Recorded(now) => {
                    recorded = *now;
                    continue;
                }
                Begins => {
                    node.doubts.reading_begins(&gpu, &move |_, _, _| recorded);
                    continue;
                }
                Gone => {
                    shown.clear();
                    Fresh::Gpu(&gpu)
                }
                Read => Fresh::Gpu(&gpu),
                ReadElsewhere => Fresh::Gpu(&other),
            };
            node.reads_fresh(show(&shown), &move |_, _, _| recorded, fresh);
        }
        let Mig::Supported { instances, .. } = &node.last.gpus[0].mig else { panic!("{at}") };
        assert_eq!(instances.first().map(|instance| instance.origin), *want, "case {at}");
        assert_eq!(node.doubts.gpus().count(), usize::from(!recorded && *want == Some(own)), "case {at}");
    }
}

fn linked(gpu: u32, far: &[u32]) -> GpuReading {
    reads(gpu, gpu, Some(far), RawMig::Unsupported)
}

fn silenced(gpu: u32) -> GpuReading {
    reads(gpu, gpu, None, RawMig::Supported { mode: MigMode::On, instances: Vec::new() })
}

#[test]
fn gpus_that_reach_each_other_are_a_group() {
    let mut node = Node::default();
    node.reads(vec![linked(0, &[1]), linked(1, &[0]), linked(2, &[]), linked(3, &[4]), linked(4, &[])]);
    let (one, other) = (Some("GPU-0"), Some("GPU-3"));
    assert_eq!(node.links(), [(one, 1), (one, 1), (None, 0), (other, 1), (other, 1)]);
    // A chain is one group, in which not everybody is a neighbour.
    node.reads(vec![linked(0, &[1]), linked(1, &[0, 2]), linked(2, &[1])]);
    assert_eq!(node.links()[..3], [(one, 1), (one, 2), (one, 1)]);
    // A group keeps its name when its first GPU leaves it, and parts do not share it.
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
fn mig_silences_links_but_not_the_groups_known_before() {
    let mut node = Node::default();
    node.reads(vec![linked(0, &[1]), linked(1, &[0])]);
    let group = (Some("GPU-0"), 1);
    node.reads(vec![silenced(0), linked(1, &[])]);
    assert_eq!(node.links(), [group, group]);
    node.reads(vec![fails(0, NvmlError::Lost { call: "c", gpu: uuid(0) }), linked(1, &[])]);
    assert_eq!(node.links()[0], group, "a lost GPU is where it was");
    node.reads(vec![linked(0, &[]), linked(1, &[])]);
    assert_eq!(node.links(), [(None, 0), (None, 0)], "the bridge was taken out");
}
