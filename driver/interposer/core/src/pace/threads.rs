//! Two threads that launch, or that take for their processes from the stock of a share, in every order
//! ([`divvy_pages::sync`]): nothing is lost, and nothing is had twice.

use super::bucket::Bucket;
use super::costs::Costs;
use super::samples::Timer;
use super::{AT_ONCE, Pace, SECOND, Work};
use divvy_pages::sync::{Model, Ordering::Relaxed};
use divvy_pages::{AccountPage, account};
use loom::thread::spawn;
use std::alloc::{Layout, alloc_zeroed};
use std::sync::Arc;

/// Zeros, which this is made of where it ships.
#[allow(unsafe_code)]
fn zeros<T>() -> Box<T> {
    // SAFETY: not of size zero, and atomics throughout, for which zeros are valid.
    unsafe { Box::from_raw(alloc_zeroed(Layout::new::<T>()).cast()) }
}

/// What two threads do with the credit of a process, of which it has some and owes some: what each paid for it. The two together
/// are less by that afterwards.
fn check(acts: [fn(&Pace) -> i64; 2]) {
    Model::default().check(move || {
        let pace: Arc<Pace> = Arc::from(zeros::<Pace>());
        pace.credit.store(5000, Relaxed);
        pace.owed.store(300, Relaxed);
        let sum = |pace: &Pace| pace.credit.load(Relaxed) - pace.owed.load(Relaxed);
        let before = sum(&pace);
        let other = spawn({
            let pace = Arc::clone(&pace);
            move || acts[1](&pace)
        });
        let paid = acts[0](&pace) + other.join().expect("no panic");
        assert_eq!(sum(&pace), before - paid);
    });
}

/// A launch that costs so much and pays its instalment.
fn launches(pace: &Pace) -> i64 {
    pace.pay(200);
    200
}

/// What was measured is given back.
fn gets_back(pace: &Pace) -> i64 {
    pace.settle(250);
    -250
}

/// What was measured is charged, some of it later.
fn is_charged(pace: &Pace) -> i64 {
    pace.settle(-AT_ONCE - 1000);
    AT_ONCE + 1000
}

#[test]
fn the_credit_of_a_process_is_what_its_launches_leave_of_it() {
    let all: [fn(&Pace) -> i64; 3] = [launches, gets_back, is_charged];
    for (one, two) in [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)] {
        check([all[one], all[two]]);
    }
}

/// Two processes that take from the stock of a share at one time: what they got, or how long they wait.
fn check_stock(now: u64, need: i64, end: fn([Result<i64, u64>; 2], i64)) {
    let page: &AccountPage = {
        let page = Box::leak(zeros::<Page>());
        page.0[..64].copy_from_slice(&account::fresh());
        let address = std::ptr::from_mut(page).cast();
        // SAFETY: of that size and never freed.
        #[allow(unsafe_code)]
        unsafe { AccountPage::at(address, account::SIZE) }.expect("a fresh page is a page")
    };
    Model::default().check(move || {
        let takes = move || Bucket { page, rate: SECOND / 2, burst: SECOND }.take(need, now);
        let other = spawn(takes);
        let taken = [takes(), other.join().expect("no panic")];
        end(taken, page.balance().load(Relaxed));
    });
}

#[repr(align(64))]
struct Page([u8; account::SIZE]);

#[test]
fn what_accrues_is_added_once_and_taken_once() {
    // A hundred milliseconds at half of the device. Who comes while the other adds them waits for a moment.
    check_stock(100_000_000, 1_000_000, |taken, left| {
        let sum: i64 = taken.into_iter().flatten().sum();
        assert_eq!((sum > 0, sum + left), (true, 50_000_000));
    });
}

#[test]
fn one_overdraws_a_stock_and_the_other_waits() {
    check_stock(20_000, 1_000_000, |taken, left| {
        let got: Vec<i64> = taken.into_iter().flatten().collect();
        assert_eq!((got.as_slice(), left), ([1_000_000].as_slice(), 10_000 - 1_000_000));
    });
}

/// Events that are done as soon as they are recorded, the later the longer after.
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
fn a_measured_launch_is_settled_once() {
    const KERNEL: Work = Work { function: 1, blocks: 1000 };
    Model::default().check(|| {
        let (pace, costs): (Arc<Pace>, Arc<Costs>) =
            (Arc::from(zeros::<Pace>()), Arc::from(zeros::<Costs>()));
        let harvest = |pace: &Pace, costs: &Costs| pace.samples.harvest(&Clock, costs, false, || 0, |_| ());
        let other = spawn({
            let (pace, costs) = (Arc::clone(&pace), Arc::clone(&costs));
            move || harvest(&pace, &costs)
        });
        let charge = costs.charge(KERNEL, || 0);
        let sample = pace.samples.begin(&Clock, &charge, || 0, |_| ());
        if let Some(sample) = sample {
            charge.cost.goes(1);
            sample.end(&Clock, true);
        }
        let back = harvest(&pace, &costs) + other.join().expect("no panic") + harvest(&pace, &costs);
        // Less what events may cost, of which nothing is known yet.
        let expected = if sample.is_some() { charge.nanoseconds - (50_000 - 1_950) } else { 0 };
        assert_eq!((back, pace.samples.is_any()), (expected, false));
    });
}
