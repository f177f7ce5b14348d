//! Shares of parts of a GPU.

use super::*;

#[test]
fn shares_of_an_instance_are_divided_among_themselves_and_released_when_nothing_is_known_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(20, 100, 0), of(60, 0, 0), of(20, 100, 0)]);
    let (mut desk, now) = (Desk::default(), 1000 * SECOND);
    // Each with the instance that it is of.
    let mut plan = |of: &[(usize, u8)], at: u64| {
        let on = |(share, mig): &(usize, u8)| {
            let mig = Some(GpuUuid([*mig; 16]));
            Planned { mig, ..shares[*share].planned(if *share == 1 { 0 } else { 100 }) }
        };
        desk.plan(GPU, of.iter().map(on).collect(), at);
        assert!(desk.moved(at).iter().all(|moved| moved.gpu == GPU));
        desk.since(GPU, at + SECOND / 2).len()
    };
    let rates = |at| shares.iter().map(|share| share.rate(at)).collect::<Vec<_>>();
    assert_eq!(plan(&[(0, 7), (1, 7), (2, 8)], now), 3);
    assert_eq!(rates(now), [Some(100), Some(60), Some(100)]);
    let is_asked = || shares.iter().map(|share| share.page().call() > 0).collect::<Vec<_>>();
    assert_eq!(is_asked(), [false, true, false], "who is idle beside another");
    assert_eq!(plan(&[(0, 7), (1, 8), (2, 8)], now + SECOND), 3);
    assert_eq!(plan(&[(0, 7), (2, 8)], now + 2 * SECOND), 2);
    assert_eq!(is_asked(), [false; 3], "nobody asks who is not divided any more");
    desk.keep(|gpu| *gpu != GPU);
    assert!(desk.since(GPU, now + 4 * SECOND).is_empty());
}
