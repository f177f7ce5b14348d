//! What the daemon says of a process that goes round its share, and that nothing is
//! lost while there is no daemon.

use crate::harness::{DRIVER, H100, NODE, World, until};
use crate::observation::{address, wait_for};
use crate::programs::program;
use divvy_kubelet::dra::v1::Claim;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::process::{Child, Command, Stdio};

/// A program in the container of a claim that takes memory of the GPU by itself.
struct Hidden(Child);

impl Hidden {
    fn start(world: &World, claim: &str) -> Self {
        let mut command = Command::new(program("divvy-sim"));
        command.arg("-C").arg(world.sim.root()).args(["client", "--memory", "512"]);
        let mut child = command.env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        // It says so once it has the memory.
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        let (pid, cgroup) = (child.id(), format!("0::/kubepods/{claim}\n"));
        let dir = world.sim.root().join("proc").join(pid.to_string());
        fs::create_dir(&dir).unwrap();
        for name in ["stat", "status", "ns", "mountinfo"] {
            symlink(format!("/proc/{pid}/{name}"), dir.join(name)).unwrap();
        }
        fs::write(dir.join("cgroup"), &cgroup).unwrap();
        // As the hook tells of the container.
        fs::write(world.run_dir().join(format!("shares/{claim}/s/cgroups/c1")), cgroup).unwrap();
        Self(child)
    }

    fn lives(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn share(world: &World, claim: &str) -> Claim {
    let result = json!({
        "request": "r0", "driver": DRIVER, "pool": NODE, "device": "gpu-0", "shareID": "s",
        "consumedCapacity": {"memory": "10Gi", "cores": "0"},
    });
    world.claim_with(claim, vec![result], json!([]))
}

fn condition(world: &World) -> Option<Value> {
    let devices = world.api.get::<ResourceClaim>("ns", "a")?.status?.devices?;
    let conditions = serde_json::to_value(devices.first()?.conditions.as_ref()?).unwrap();
    conditions.get(0).cloned()
}

#[tokio::test]
async fn a_process_that_hides_is_told_of_where_its_owner_looks() {
    let world = World::up(H100).await;
    let address = address();
    let _daemon = world.start(&["--http-address", &address, "--end-processes", "none"]).await;
    world.prepare(&share(&world, "a")).await.unwrap();
    let mut hidden = Hidden::start(&world, "a");
    let said =
        || world.api.list::<Event>().into_iter().find(|event| event.reason.as_deref() == Some("ShareBroken"));
    until("there is an event", || said().is_some()).await;
    let event = said().unwrap();
    assert_eq!(event.regarding.unwrap().kind.as_deref(), Some("ResourceClaim"));
    let note = event.note.unwrap();
    assert!(note.contains("claim ns/a") && note.contains(&format!("process {}", hidden.0.id())), "{note}");
    until("there is a condition", || condition(&world).is_some()).await;
    let told = condition(&world).unwrap();
    assert_eq!(
        (&told["type"], &told["status"], &told["reason"]),
        (&json!("LimitKept"), &json!("False"), &json!("HiddenProcess"))
    );
    wait_for(&address, "/metrics", "divvy_share_findings_total{finding=\"hidden\",done=\"reported\"} 1")
        .await;
    assert!(hidden.lives());
    drop(hidden);
    until("the condition is true again", || condition(&world).is_some_and(|told| told["status"] == "True"))
        .await;
}

#[tokio::test]
async fn a_daemon_that_was_killed_is_no_way_round_the_limit() {
    let world = World::up(H100).await;
    let daemon = world.start(&[]).await;
    world.prepare(&share(&world, "a")).await.unwrap();
    daemon.kill();
    let mut hidden = Hidden::start(&world, "a");
    let policy = world.run_dir().join("shares/a/s/policy");
    let before = fs::read(&policy).unwrap();
    let _daemon = world.spawn(&[]);
    until("it is ended", || state(hidden.0.id()) == 'Z').await;
    assert!(!hidden.lives());
    assert_eq!(fs::read(&policy).unwrap(), before, "the limit stayed");
}

fn state(pid: u32) -> char {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('Z')
}
