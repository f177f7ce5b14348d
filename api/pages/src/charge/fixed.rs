//! Memory that cannot move, of a share that may hold more than it has of the device.
//!
//! Such a share has two limits on one total: all that it holds, and what of that has to be on the device, which is all but
//! managed memory. How much is managed stands in the slots, each of which its own process writes: after the total when
//! it grows, before it when it shrinks. So what the slots say, read between two looks at the total that found the same
//! word, is never more than what is managed then: had some of it been freed meanwhile, the total would be another word,
//! and a charge that goes by the sum takes the total from just the word that it began with. What is being made
//! managed counts as fixed until it is.

use super::{Full, Patience, Peers, Seat, changed};
use crate::account::{AccountPage, Fault, SlotState, bytes};
use crate::word::Attempt;

/// Charges memory that stays on the device: the share may have `soft` bytes of that, and its seat's limit in all.
#[inline]
pub fn charge_fixed(seat: &Seat<'_>, soft: u64, amount: u64, peers: &impl Peers) -> Result<(), Full> {
    let attempt = Attempt::begin();
    // It fits even if nothing were managed.
    let least = Seat { limit: soft.min(seat.limit), ..*seat };
    if amount == 0 || least.take(amount) { Ok(()) } else { settled(seat, soft, amount, peers, attempt) }
}

#[cold]
fn settled(
    seat: &Seat<'_>,
    soft: u64,
    amount: u64,
    peers: &impl Peers,
    mut attempt: Attempt,
) -> Result<(), Full> {
    let mut patience = Patience { peers, round: 0 };
    let Some(slot) = seat.page.slot(seat.slot) else { return Err(Full) };
    loop {
        let Some(total) = seat.page.settle(Some(seat.slot), peers) else {
            if patience.pause(attempt) {
                attempt = Attempt::begin();
                continue;
            }
            seat.page.count(Fault::Waited);
            return Err(Full);
        };
        let limit = seat.limit.min(soft.saturating_add(seat.page.managed()));
        if limit.saturating_sub(bytes(total)) >= amount {
            slot.begin();
            let taken = seat.page.total.word.swap_if(total, changed(total, bytes(total) + amount));
            slot.end(if taken { amount } else { 0 });
            if taken {
                return Ok(());
            }
        } else if seat.page.total.word.load() == total {
            seat.page.count(Fault::Refused);
            return Err(Full);
        }
    }
}

impl AccountPage {
    /// Bytes of managed memory that the living hold, by their slots.
    fn managed(&self) -> u64 {
        let managed = self.slots().iter().filter_map(|slot| {
            let owner = slot.owner();
            let line = slot.line();
            let is_dead = line.about == owner && line.dead;
            (owner.state() == SlotState::Live && !is_dead).then(|| slot.managed())
        });
        managed.fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{charge, uncharge};
    use super::*;
    use crate::explore::{Act, End, Watchers, answers, explore, page, who};
    use crate::word::Word;

    const SOFT: u64 = 3;
    const LIMIT: u64 = 6;

    /// What a process allocates, for good or to free it at once.
    #[derive(Clone, Copy)]
    enum Do {
        Fixed(u64),
        FixedAwhile(u64),
        Managed(u64),
        ManagedAwhile(u64),
    }
    use Do::*;

    /// Checks, however the plans interleave and whichever are killed: the driver is never asked for more than
    /// `SOFT` bytes that cannot move by those who live, nor is more charged than `LIMIT`.
    fn check(kills: u32, plans: &[&[Do]]) {
        let page = page();
        // What the driver has made: changed after the charge, and before it is given back.
        let made: &Word = Box::leak(Box::default());
        let acts: Vec<Act<'_>> = plans
            .iter()
            .zip(1..)
            .map(|(plan, pid)| -> Act<'_> {
                let slot = page.register(&who(pid), &Watchers).expect("there are slots");
                let seat = Seat { page, slot, limit: LIMIT };
                let note = move |by| page.slots[usize::from(slot)].note(0, by);
                let fixed = move |amount: u64, awhile: bool| {
                    if charge_fixed(&seat, SOFT, amount, &Watchers).is_err() {
                        return false;
                    }
                    made.update(|made| made + amount);
                    if awhile {
                        made.update(|made| made - amount);
                        uncharge(&[seat], amount);
                    }
                    true
                };
                let managed = move |amount: u64, awhile: bool| {
                    if charge(&[seat], amount, &Watchers).is_err() {
                        return false;
                    }
                    note(amount as i64);
                    if awhile {
                        note(-(amount as i64));
                        uncharge(&[seat], amount);
                    }
                    true
                };
                Box::new(move || {
                    let did = |act: &Do| match *act {
                        Fixed(amount) => fixed(amount, false),
                        FixedAwhile(amount) => fixed(amount, true),
                        Managed(amount) => managed(amount, false),
                        ManagedAwhile(amount) => managed(amount, true),
                    };
                    answers(plan.iter().map(did))
                })
            })
            .collect();
        explore(
            &acts,
            kills,
            &|read| {
                assert!(bytes(page.total.word.peek(read)) <= LIMIT, "beyond the limit");
                assert!(kills > 0 || made.peek(read) <= SOFT, "more than the device has for it");
            },
            &|last| {
                let held = |(plan, end): (&&[Do], &End)| match end {
                    End::Killed => 0,
                    End::Result(answers) => plan.iter().zip(0..).fold(0, |sum, (act, at)| match *act {
                        Fixed(amount) if answers >> at & 1 == 1 => sum + amount,
                        _ => sum,
                    }),
                };
                assert!(plans.iter().zip(&last.ends).map(held).sum::<u64>() <= SOFT, "{:?}", last.ends);
            },
        );
    }

    #[test]
    fn what_cannot_move_keeps_to_its_limit_beside_what_can() {
        check(0, &[&[ManagedAwhile(3), Fixed(1)], &[Fixed(2), Fixed(2)]]);
        check(0, &[&[Managed(2), ManagedAwhile(1)], &[Fixed(3), FixedAwhile(1)]]);
        check(0, &[&[Fixed(2), Managed(3)], &[ManagedAwhile(2), Fixed(2)]]);
        check(1, &[&[ManagedAwhile(3), Fixed(2)], &[Fixed(2), Fixed(1)]]);
        check(1, &[&[Managed(3)], &[Fixed(3), FixedAwhile(1)]]);
    }

    #[test]
    fn what_is_managed_leaves_room_for_what_is_not() {
        let page = page();
        let slot = page.register(&who(1), &Watchers).expect("there are slots");
        let seat = Seat { page, slot, limit: LIMIT };
        charge(&[seat], 3, &Watchers).expect("it fits");
        page.slots[0].note(0, 3);
        assert_eq!(charge_fixed(&seat, SOFT, 4, &Watchers), Err(Full));
        assert_eq!(charge_fixed(&seat, SOFT, 3, &Watchers), Ok(()));
        assert_eq!((page.used(), charge_fixed(&seat, SOFT, 1, &Watchers)), (6, Err(Full)));
        assert_eq!(page.counted(Fault::Refused), 2);
    }
}
