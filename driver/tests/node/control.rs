//! The control socket of `divvy node`: health, release for a reset, take-back, forget.

use crate::harness::{TestNode, until};
use divvy_api::control::{Answer, GpuHealth, Request, SOCKET};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

fn send(node: &TestNode, line: &str) -> Answer {
    let mut stream = UnixStream::connect(node.run_dir().join(SOCKET)).unwrap();
    stream.write_all(format!("{line}\n").as_bytes()).unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    serde_json::from_str(&answer).unwrap()
}

fn ask(node: &TestNode, request: &Request) -> Answer {
    send(node, &serde_json::to_string(request).unwrap())
}

fn health(node: &TestNode) -> Vec<GpuHealth> {
    match ask(node, &Request::Health) {
        Answer::Health(gpus) => gpus,
        other => panic!("{other:?}"),
    }
}

fn expect_refused(answer: Answer, text: &str) {
    assert!(matches!(&answer, Answer::Refused(why) if why.contains(text)), "{answer:?}");
}

#[tokio::test]
async fn released_gpu_is_reset_while_the_others_work() {
    let node = TestNode::new("2xH100-SXM5-80GB").await;
    let _daemon = node.start_daemon(&[]).await;
    node.prepare(&node.claim("busy", &["gpu-1"])).await.unwrap();
    node.update_sim(|state| state.xid(0, 48, None).unwrap());
    until("gpu-0 needs a reset", || health(&node)[0].state == "needs-reset").await;
    assert_eq!(health(&node)[1].claims, ["ns/busy"]);

    let release = Request::Release { gpu: "gpu-0".to_owned() };
    assert!(matches!(ask(&node, &release), Answer::Done(_)));
    until("the release is shown", || health(&node)[0].conditions.iter().any(|it| it.contains("handed over")))
        .await;
    assert!(node.prepare(&node.claim("a", &["gpu-0"])).await.is_err());
    node.unprepare(&node.claim("busy", &["gpu-1"])).await.unwrap();
    node.prepare_until_ok(&node.claim("other", &["gpu-1"])).await;

    node.update_sim(|state| state.reset(0, false).unwrap());
    assert!(matches!(ask(&node, &Request::TakeBack { gpu: "0".to_owned() }), Answer::Done(_)));
    until("gpu-0 is healthy", || {
        let gpu = &health(&node)[0];
        (gpu.state.as_str(), gpu.presence.as_str(), gpu.conditions.len()) == ("healthy", "present", 0)
    })
    .await;
    node.prepare_until_ok(&node.claim("a", &["gpu-0"])).await;
}

#[tokio::test]
async fn release_survives_a_restart_of_the_daemon() {
    let node = TestNode::new("2xL4").await;
    let daemon = node.start_daemon(&[]).await;
    assert!(matches!(ask(&node, &Request::Release { gpu: "gpu-1".to_owned() }), Answer::Done(_)));
    daemon.kill();
    let _daemon = node.start_daemon(&[]).await;
    assert!(node.prepare(&node.claim("a", &["gpu-1"])).await.is_err());
    assert!(matches!(ask(&node, &Request::TakeBack { gpu: "gpu-1".to_owned() }), Answer::Done(_)));
    node.prepare_until_ok(&node.claim("a", &["gpu-1"])).await;
}

#[tokio::test]
async fn wrong_requests_are_refused_with_the_cause() {
    let node = TestNode::new("2xL4").await;
    let _daemon = node.start_daemon(&[]).await;
    for line in ["", "{}", "health", r#"{"do":"explode"}"#, r#"{"do":"release"}"#, "\u{0}\u{1}"] {
        expect_refused(send(&node, line), "not a request that this version knows");
    }
    let named = |gpu: &str| gpu.to_owned();
    expect_refused(ask(&node, &Request::Release { gpu: named("gpu-7") }), "not a GPU of this node");
    expect_refused(ask(&node, &Request::TakeBack { gpu: named("gpu-0") }), "is not released");
    expect_refused(ask(&node, &Request::Forget { gpu: named("gpu-0") }), "is not missing");
    node.update_sim(|state| state.unplug(1).unwrap());
    until("gpu-1 is missing", || health(&node)[1].presence == "missing").await;
    assert!(matches!(ask(&node, &Request::Forget { gpu: named("gpu-1") }), Answer::Done(_)));
    until("gpu-1 is forgotten", || health(&node).len() == 1).await;
}
