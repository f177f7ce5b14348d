//! Loom models of two threads that launch, or of two processes that take from one bucket: no charge
//! is lost or counted twice.

use super::bucket::{Bucket, SECOND_NS};
use super::cost_model::{Costs, Work};
use super::samples::Timer;
use super::state::{IMMEDIATE_CHARGE_MAX_NS, Throttle};
use divvy_pages::sync::{Model, Ordering::Relaxed};
use divvy_pages::{AccountPage, account};
use loom::thread::spawn;
use std::alloc::{Layout, alloc_zeroed};
use std::sync::Arc;

/// A zeroed value, as the library allocates it.
#[allow(unsafe_code)]
fn zeros<T>() -> Box<T> {
    // SAFETY: the size is not 0, and all fields are atomics, for which zeros are valid.
    unsafe { Box::from_raw(alloc_zeroed(Layout::new::<T>()).cast()) }
}

/// Runs `acts` in two threads on one throttle with credit and debt. Each act returns what it paid;
/// the sum of credit and debt must drop by exactly that.
fn check(acts: [fn(&Throttle) -> i64; 2]) {
    Model::default().check(move || {
        let throttle: Arc<Throttle> = Arc::from(zeros::<Throttle>());
        throttle.credit.store(5000, Relaxed);
        throttle.debt.store(300, Relaxed);
        let sum = |throttle: &Throttle| throttle.credit.load(Relaxed) - throttle.debt.load(Relaxed);
        let before = sum(&throttle);
        let other = spawn({
            let throttle = Arc::clone(&throttle);
            move || acts[1](&throttle)
        });
        let paid = acts[0](&throttle) + other.join().expect("no panic");
        assert_eq!(sum(&throttle), before - paid);
    });
}

/// A launch of 200 ns that also pays an instalment.
fn launches(throttle: &Throttle) -> i64 {
    throttle.pay(200);
    200
}

/// Refunds a measured difference.
fn gets_back(throttle: &Throttle) -> i64 {
    throttle.settle(250);
    -250
}

/// Charges a measured difference, partly as debt.
fn is_charged(throttle: &Throttle) -> i64 {
    throttle.settle(-IMMEDIATE_CHARGE_MAX_NS - 1000);
    IMMEDIATE_CHARGE_MAX_NS + 1000
}

#[test]
fn concurrent_launches_and_refunds_keep_the_credit() {
    let all: [fn(&Throttle) -> i64; 3] = [launches, gets_back, is_charged];
    for (one, two) in [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)] {
        check([all[one], all[two]]);
    }
}

/// Two processes take from one bucket at the same time. `end` gets their results and the balance.
fn check_stock(now: u64, need: i64, end: fn([Result<i64, u64>; 2], i64)) {
    let page: &AccountPage = {
        let page = Box::leak(zeros::<Page>());
        page.0[..64].copy_from_slice(&account::fresh());
        let address = std::ptr::from_mut(page).cast();
        // SAFETY: the memory has that size and is never freed.
        #[allow(unsafe_code)]
        unsafe { AccountPage::at(address, account::SIZE) }.expect("a fresh page is a page")
    };
    Model::default().check(move || {
        let takes = move || Bucket { page, rate: SECOND_NS / 2, burst: SECOND_NS }.take(need, now);
        let other = spawn(takes);
        let taken = [takes(), other.join().expect("no panic")];
        end(taken, page.balance().load(Relaxed));
    });
}

#[repr(align(64))]
struct Page([u8; account::SIZE]);

#[test]
fn accrued_time_is_added_once_and_taken_once() {
    // 100 ms at half of the device. The process that comes while the other refills waits for a
    // moment.
    check_stock(100_000_000, 1_000_000, |taken, left| {
        let sum: i64 = taken.into_iter().flatten().sum();
        assert_eq!((sum > 0, sum + left), (true, 50_000_000));
    });
}

#[test]
fn one_process_overdraws_and_the_other_waits() {
    check_stock(20_000, 1_000_000, |taken, left| {
        let got: Vec<i64> = taken.into_iter().flatten().collect();
        assert_eq!((got.as_slice(), left), ([1_000_000].as_slice(), 10_000 - 1_000_000));
    });
}

/// Events that complete at once. Any two are 50 us apart.
struct Clock;

impl Timer for Clock {
    fn context(&self) -> u64 {
        77
    }

    fn create(&self) -> u64 {
        1
    }

    fn destroy(&self, _event: u64) {}

    fn record(&self, _event: u64) -> bool {
        true
    }

    fn is_done(&self, _event: u64) -> Option<bool> {
        Some(true)
    }

    fn elapsed(&self, _from: u64, _to: u64) -> Option<i64> {
        Some(50_000)
    }
}

#[test]
fn measured_launch_is_settled_once() {
    const KERNEL: Work = Work { function: 1, blocks: 1000 };
    Model::default().check(|| {
        let (throttle, costs): (Arc<Throttle>, Arc<Costs>) =
            (Arc::from(zeros::<Throttle>()), Arc::from(zeros::<Costs>()));
        let harvest =
            |throttle: &Throttle, costs: &Costs| throttle.samples.harvest(&Clock, costs, false, || 0, |_| ());
        let other = spawn({
            let (throttle, costs) = (Arc::clone(&throttle), Arc::clone(&costs));
            move || harvest(&throttle, &costs)
        });
        let charge = costs.charge(KERNEL, || 0);
        let sample = throttle.samples.begin(&Clock, &charge, || 0, |_| ());
        if let Some(sample) = sample {
            charge.cost.goes(1);
            sample.end(&Clock, true);
        }
        let back = harvest(&throttle, &costs) + other.join().expect("no panic") + harvest(&throttle, &costs);
        // Minus the assumed cost of events, which is not measured yet.
        let expected = if sample.is_some() { charge.nanoseconds - (50_000 - 1_950) } else { 0 };
        assert_eq!((back, throttle.samples.is_any()), (expected, false));
    });
}
