//! A claim of two pods: programs of different users, in different pid namespaces, have one share.
//!
//! Only where root runs it: nobody else has two users.

mod common;

use common::{Program, built};
use divvy_escape::container::{Container, Recipe};
use divvy_escape::node::{CONTEXT, MIB, Node, Share};
use divvy_escape::watch::Watch;
use std::process::Command;
use std::time::{Duration, Instant};

/// No test waits longer for what should come within seconds.
const PATIENCE: Duration = Duration::from_secs(60);
const LIMIT: u64 = 4096 * MIB;
/// All that a program with a context of its own can have of it, beside another.
const REST: u64 = LIMIT - 2 * CONTEXT;

struct World {
    node: Node,
    share: Share,
}

impl World {
    /// None where nobody can be another user.
    fn up() -> Option<Self> {
        let user = Command::new("id").arg("-u").output().expect("id starts");
        if user.stdout != b"0\n" {
            return None;
        }
        let node = Node::up("L4").expect("a node");
        built().0.install(&node).expect("programs");
        // A GPU is there for every user; the simulator's files are its owner's.
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

    /// What the account says is used is what is used.
    fn is_charged(&self, bytes: u64) {
        assert_eq!(self.share.used().expect("an account"), bytes);
        assert_eq!(self.node.used(), bytes);
    }
}

/// Two programs take what there is; one is killed, and the other gets that.
fn check(world: &World, one: &Container, other: &Container) {
    let mut first = world.program(one, 1000);
    let mut second = world.program(other, 2000);
    assert_eq!(first.takes(1024 * MIB), 1024 * MIB);
    assert_eq!(second.takes(512 * MIB), 512 * MIB);
    world.is_charged(1536 * MIB + 2 * CONTEXT);
    let rest = REST / (16 * MIB) * 16 * MIB - 1536 * MIB;
    assert_eq!(second.takes(LIMIT), rest);
    assert_eq!(first.takes(16 * MIB), 0);
    world.is_charged(1536 * MIB + rest + 2 * CONTEXT);
    first.kill();
    let (begun, mut got) = (Instant::now(), 0);
    while got < 1024 * MIB && begun.elapsed() < PATIENCE {
        got += second.takes(1024 * MIB - got);
    }
    println!("had again after {:?}", begun.elapsed());
    assert_eq!(got, 1024 * MIB);
    world.is_charged(1536 * MIB + rest + CONTEXT);
}

#[test]
fn users_in_containers_of_their_own_have_one_share_and_the_node_tells_of_the_dead() {
    let Some(world) = World::up() else { return };
    let _agent = Watch::start(&world.node).expect("an agent");
    check(&world, &world.container(), &world.container());
}

#[test]
fn users_in_one_container_have_one_share_and_see_who_dies() {
    let Some(world) = World::up() else { return };
    let container = world.container();
    check(&world, &container, &container);
}
