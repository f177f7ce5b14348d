//! A claim of two pods: programs of different users, in different pid namespaces, use one share.
//!
//! The tests need root, because only root can start programs as two users. Otherwise they pass
//! without a check.

mod common;

use common::{Program, built};
use divvy_escape::container::{Container, Recipe};
use divvy_escape::node::{CONTEXT, MIB, Node, Share};
use divvy_escape::watch::Watch;
use std::process::Command;
use std::time::{Duration, Instant};

/// The time limit for events that are expected within seconds.
const TIMEOUT: Duration = Duration::from_secs(60);
const LIMIT: u64 = 4096 * MIB;
/// The memory that is left for allocations beside the contexts of two programs, in bytes.
const ALLOCATABLE: u64 = LIMIT - 2 * CONTEXT;

struct SharedClaim {
    node: Node,
    share: Share,
}

impl SharedClaim {
    /// `None` without root.
    fn up() -> Option<Self> {
        let user = Command::new("id").arg("-u").output().expect("id starts");
        if user.stdout != b"0\n" {
            return None;
        }
        let node = Node::up("L4").expect("a node");
        built().0.install(&node).expect("programs");
        // Every user may open a GPU, but the simulator's files belong to its owner.
        let opened = Command::new("chmod").args(["-R", "a+rwX"]).arg(node.sim.dir()).status();
        assert!(opened.expect("chmod starts").success());
        let share = node.share("claim", "share", LIMIT).expect("pages");
        Some(Self { node, share })
    }

    fn container(&self) -> Container {
        let (library, shares) = (Some(built().1.library.clone()), vec![self.share.clone()]);
        let recipe = Recipe { library, shares, root: true, ..Recipe::default() };
        Container::start(&self.node, &recipe).expect("a container")
    }

    fn program(&self, container: &Container, user: u32) -> Program {
        Program::start(&self.node, container, Some(user))
    }

    /// Asserts the bytes in use, on the account page and on the GPU.
    fn assert_used(&self, bytes: u64) {
        assert_eq!(self.share.used().expect("an account"), bytes);
        assert_eq!(self.node.used(), bytes);
    }
}

/// Two programs allocate the whole share; one is killed, and the other gets its memory.
fn check(claim: &SharedClaim, one: &Container, other: &Container) {
    let mut first = claim.program(one, 1000);
    let mut second = claim.program(other, 2000);
    assert_eq!(first.allocate(1024 * MIB), 1024 * MIB);
    assert_eq!(second.allocate(512 * MIB), 512 * MIB);
    claim.assert_used(1536 * MIB + 2 * CONTEXT);
    let rest = ALLOCATABLE / (16 * MIB) * 16 * MIB - 1536 * MIB;
    assert_eq!(second.allocate(LIMIT), rest);
    assert_eq!(first.allocate(16 * MIB), 0);
    claim.assert_used(1536 * MIB + rest + 2 * CONTEXT);
    first.kill();
    let (begun, mut got) = (Instant::now(), 0);
    while got < 1024 * MIB && begun.elapsed() < TIMEOUT {
        got += second.allocate(1024 * MIB - got);
    }
    println!("memory available again after {:?}", begun.elapsed());
    assert_eq!(got, 1024 * MIB);
    claim.assert_used(1536 * MIB + rest + CONTEXT);
}

#[test]
fn users_in_separate_containers_use_one_share() {
    let Some(claim) = SharedClaim::up() else { return };
    let _agent = Watch::start(&claim.node).expect("an agent");
    check(&claim, &claim.container(), &claim.container());
}

#[test]
fn users_in_one_container_use_one_share() {
    let Some(claim) = SharedClaim::up() else { return };
    let container = claim.container();
    check(&claim, &container, &container);
}
