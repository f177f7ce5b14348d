//! Shares of parts of a GPU.

use super::*;

#[test]
fn instance_shares_are_divided_and_later_released() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(20, 100, 0), of(60, 0, 0), of(20, 100, 0)]);
    let (mut desk, now) = (GrantTable::default(), 1000 * NS_PER_SECOND);
    // Each with the instance that it is of.
    let mut plan = |of: &[(usize, u8)], at: u64| {
        let on = |(share, mig): &(usize, u8)| {
            let mig = Some(GpuUuid([*mig; 16]));
            PlannedShare { mig, ..shares[*share].planned(if *share == 1 { 0 } else { 100 }) }
        };
        desk.plan(GPU, of.iter().map(on).collect(), at);
        assert!(desk.moved(at).iter().all(|moved| moved.gpu == GPU));
        desk.since(GPU, at + NS_PER_SECOND / 2).len()
    };
    let rates = |at| shares.iter().map(|share| share.rate(at)).collect::<Vec<_>>();
    assert_eq!(plan(&[(0, 7), (1, 7), (2, 8)], now), 3);
    assert_eq!(rates(now), [Some(100), Some(60), Some(100)]);
    let is_asked = || shares.iter().map(|share| share.page().wakeup_request() > 0).collect::<Vec<_>>();
    assert_eq!(is_asked(), [false, true, false], "who is idle beside another");
    assert_eq!(plan(&[(0, 7), (1, 8), (2, 8)], now + NS_PER_SECOND), 3);
    assert_eq!(plan(&[(0, 7), (2, 8)], now + 2 * NS_PER_SECOND), 2);
    assert_eq!(is_asked(), [false; 3], "nobody asks who is not divided any more");
    desk.keep(|gpu| *gpu != GPU);
    assert!(desk.since(GPU, now + 4 * NS_PER_SECOND).is_empty());
}
