//! placeholder
use core::sync::atomic::AtomicU64;
pub(crate) fn load(_: &AtomicU64) -> Option<u64> {
    None
}
pub(crate) fn store(_: &AtomicU64, _: u64) -> bool {
    false
}
pub(crate) fn swap_if(_: &AtomicU64, _: u64, _: u64) -> Option<bool> {
    None
}
