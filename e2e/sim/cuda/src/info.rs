//! What memory there is, and what an address is.

use crate::argument::Out;
use crate::context;
use crate::frame::entry;

entry! {
    fn cuMemGetInfo(_process; free: Out<u32>, total: Out<u32>) {
        let (left, all) = context::current()?.guest.memory();
        free.offer(u32::try_from(left).unwrap_or(u32::MAX));
        total.offer(u32::try_from(all).unwrap_or(u32::MAX));
        Ok(())
    }

    fn cuMemGetInfo_v2(_process; free: Out<u64>, total: Out<u64>) {
        let (left, all) = context::current()?.guest.memory();
        free.offer(left);
        total.offer(all);
        Ok(())
    }
}
