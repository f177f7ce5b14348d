//! Runs ordinary programs with the library loaded. Each must behave as it does without the library.
//!
//! Each sample runs as the same shell line in two containers: one with the library and a share, one
//! without both. Standard output, standard error and the exit code are compared byte for byte. With
//! `injection: shim` the library is only loaded by programs that load the GPU driver, so the
//! samples for it do.

use crate::cdi::Prepared;
use crate::container::{Container, Recipe};
use crate::node::{MIB, Node};
use crate::programs;
use anyhow::{Context, Result, ensure};
use divvy_api::sharing::Injection;
use std::path::Path;
use std::process::Output;

/// An ordinary program.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub name: &'static str,
    /// Requirements of the sample: programs in `PATH`, or files in the loader's directories.
    pub needs: &'static [&'static str],
    /// A line for `sh`, run in the directory that contains `corpus`, `asan`, `asan-shared` and
    /// `static`.
    pub line: &'static str,
    /// How the library comes into the container.
    pub injection: Injection,
}

const fn sample(name: &'static str, needs: &'static [&'static str], line: &'static str) -> Sample {
    Sample { name, needs, line, injection: Injection::Preload }
}

const fn shimmed(name: &'static str, needs: &'static [&'static str], line: &'static str) -> Sample {
    Sample { name, needs, line, injection: Injection::Shim }
}

/// Uses CUDA through ctypes, where there is a driver.
const CTYPES: &str = r#"python3 -c '
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context, address = ctypes.c_void_p(), ctypes.c_uint64()
print(cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cuda.cuCtxSetCurrent(context))
print(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 20)), cuda.cuMemFree_v2(address))
'"#;

pub const SAMPLES: &[Sample] = &[
    sample("a program in C", &[], "./corpus one two"),
    sample("bash", &["bash"], "bash -c 'for i in 1 2 3; do echo $((i * i)); done | sort -r; exit 7'"),
    sample("a pipeline", &["awk", "sed"], "seq 1000 | awk '{ s += $1 } END { print s }' | sed 's/5/five/g'"),
    sample(
        "python",
        &["python3"],
        "python3 -c 'import json, threading; print(json.dumps({str(i): i for i in range(9)}))'",
    ),
    sample("python, ctypes", &["python3"], CTYPES),
    sample(
        "python, subprocess",
        &["python3"],
        "python3 -c 'import subprocess; print(subprocess.run([\"./corpus\"], capture_output=True))'",
    ),
    sample("java", &["java"], "java -Xshare:off -XX:TieredStopAtLevel=1 Corpus.java"),
    sample("node", &["node"], "node -e 'console.log([3,1,2].sort(), process.argv.length); process.exit(9)'"),
    sample("perl", &["perl"], "perl -e 'print join(\",\", map { $_ ** 2 } 1..9), \"\\n\"; exit 3'"),
    sample(
        "tcmalloc preloaded too",
        &["libtcmalloc_minimal.so.4"],
        "LD_PRELOAD=libtcmalloc_minimal.so.4 ./corpus",
    ),
    sample("jemalloc preloaded too", &["libjemalloc.so.2"], "LD_PRELOAD=libjemalloc.so.2 ./corpus"),
    sample(
        "both, in python",
        &["libtcmalloc_minimal.so.4", "libjemalloc.so.2", "python3"],
        "LD_PRELOAD='libjemalloc.so.2 libtcmalloc_minimal.so.4' \
         python3 -c 'print(sum(len(str(i)) for i in range(99999)))'",
    ),
    sample("ASan, static runtime", &[], "./asan"),
    sample("setuid", &["setpriv"], "setpriv --reuid=65534 --regid=65534 --clear-groups ./setuid id"),
    sample("static", &[], "./static"),
    sample("busybox", &["busybox"], "busybox sh -c 'busybox seq 3; exit 5'"),
    sample(
        "gdb",
        &["gdb"],
        "gdb -q -nx -batch -ex 'run > out' -ex 'print $_exitcode' ./corpus 2>/dev/null | grep '^\\$1'; \
         cat out; rm out",
    ),
    sample("strace", &["strace"], "strace -f -o /dev/null ./corpus"),
    sample(
        "ld.so by hand",
        &[],
        "$(ls /lib64/ld-linux-x86-64.so.2 /lib/ld-linux-aarch64.so.1 2>/dev/null) ./corpus",
    ),
    shimmed("shim: a program in C", &[], "./corpus cuda"),
    shimmed("shim: ASan, shared runtime", &[], "./asan-shared cuda"),
    shimmed("shim: ASan, static runtime", &[], "./asan cuda"),
    shimmed("shim: python, ctypes", &["python3"], CTYPES),
    shimmed("shim: jemalloc preloaded", &["libjemalloc.so.2"], "LD_PRELOAD=libjemalloc.so.2 ./corpus cuda"),
    shimmed("shim: setuid", &["setpriv"], "setpriv --reuid=65534 --regid=65534 --clear-groups ./setuid cuda"),
    shimmed("shim: strace", &["strace"], "strace -f -o /dev/null ./corpus cuda"),
];

const JAVA: &str = "public class Corpus {
  public static void main(String[] words) throws Exception {
    long sum = 0;
    for (int i = 0; i < 1000; i++) sum += new String(\"divvy\" + i).hashCode();
    System.out.println(sum + \" \" + words.length);
    System.exit(6);
  }
}
";

/// Containers with the programs: without the library, with it preloaded, and with the shim.
pub struct Corpus {
    native: Container,
    preload: Container,
    shim: Container,
    node: Node,
}

impl Corpus {
    pub fn start(library: &Path) -> Result<Self> {
        let node = Node::up("L4")?;
        let to = node.programs();
        programs::compile(&["corpus.c"], &to.join("corpus"), &["-pthread", "-ldl"])?;
        programs::compile(&["corpus.c"], &to.join("static"), &["-static", "-pthread", "-ldl"])?;
        let asan = ["-pthread", "-ldl", "-fsanitize=address", "-static-libasan"];
        programs::compile(&["corpus.c"], &to.join("asan"), &asan)?;
        // The default runtime of gcc is the shared one.
        programs::compile(&["corpus.c"], &to.join("asan-shared"), &asan[..3])?;
        std::fs::write(to.join("Corpus.java"), JAVA)?;
        setuid(&to)?;
        let share = node.share("2f1c7f5e-7a0b-4c57-9d3e-5a2f0c4b8e11", "share", 1024 * MIB)?;
        let libraries = library.parent().context("a library without a directory")?.to_owned();
        let recipe = Recipe { root: true, ..Recipe::default() };
        let native = Container::start(&node, &recipe)?;
        let prepared = vec![Prepared { share: share.clone(), libraries, injection: Injection::Shim }];
        let shim = Container::start(&node, &Recipe { prepared, ..recipe.clone() })?;
        let with = Recipe { library: Some(library.to_owned()), shares: vec![share], ..recipe };
        Ok(Self { native, preload: Container::start(&node, &with)?, shim, node })
    }

    /// Runs a sample without the library and with it. Returns the difference, if there is one.
    pub fn compare(&self, sample: &Sample) -> Result<Option<String>> {
        for needed in sample.needs {
            let probe = format!("command -v {needed} || ldconfig -p | grep -F {needed}");
            let is_installed = self.run(&self.native, &probe)?.status.success();
            ensure!(is_installed, "{} needs {needed}, which this machine does not have", sample.name);
        }
        let container = match sample.injection {
            Injection::Preload => &self.preload,
            Injection::Shim => &self.shim,
        };
        let (without, with) = (self.run(&self.native, sample.line)?, self.run(container, sample.line)?);
        let visible = |out: &Output| {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            (out.status.code(), text(&out.stdout), text(&out.stderr))
        };
        let (without, with) = (visible(&without), visible(&with));
        ensure!(!without.1.is_empty(), "{} printed nothing: {}", sample.name, without.2);
        Ok((without != with).then(|| format!("without {without:?}\nwith    {with:?}")))
    }

    fn run(&self, container: &Container, line: &str) -> Result<Output> {
        let line = format!("cd {} && {line}", self.node.programs().display());
        container.command(Path::new("sh")).args(["-c", &line]).output().context("cannot start nsenter")
    }
}

/// Installs the sample program with the setuid bit.
fn setuid(programs: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let file = programs.join("setuid");
    std::fs::copy(programs.join("corpus"), &file)?;
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o4755))?;
    Ok(())
}
