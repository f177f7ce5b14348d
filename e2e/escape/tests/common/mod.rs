//! What tests play with.

use divvy_escape::programs::Programs;
use divvy_escape::trial::Enforcement;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

/// The programs, and the library as it ships.
pub(crate) fn built() -> &'static (Programs, Enforcement) {
    static BUILT: OnceLock<(Programs, Enforcement)> = OnceLock::new();
    BUILT.get_or_init(|| {
        // Of each test program its own: they may run at once.
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(env!("CARGO_CRATE_NAME"));
        let build = concat!(env!("CARGO_MANIFEST_DIR"), "/../../driver/interposer/build");
        let status = Command::new(build).arg(&out).status().expect("driver/interposer/build starts");
        assert!(status.success(), "driver/interposer/build failed");
        let raw = Path::new(env!("CARGO_BIN_EXE_divvy-escape"));
        let programs = Programs::build(&out.join("programs"), None, raw).expect("a C compiler");
        (programs, Enforcement { library: out.join("libdivvy.so"), environment: Vec::new() })
    })
}
