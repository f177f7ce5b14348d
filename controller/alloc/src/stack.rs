//! A stack for CEL, which is parsed and evaluated recursively.

/// The longest expression that the API server accepts needs up to 256 MiB of stack in an
/// unoptimized build.
const STACK_BYTES: usize = 512 << 20;

/// Runs `work` on a thread with a stack that is large enough for any expression.
///
/// # Errors
///
/// Fails if the thread cannot be started or panics.
pub(crate) fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("divvy-alloc".to_owned()).stack_size(STACK_BYTES);
        let thread = thread.spawn_scoped(scope, work).map_err(|cause| cause.to_string())?;
        thread.join().map_err(|_| "the allocator panicked; this is a bug".to_owned())
    })
}
