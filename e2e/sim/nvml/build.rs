//! Sets the soname of the library and writes stubs for the symbols that `symbols.txt` does not mark
//! as real.
use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rerun-if-changed=symbols.txt");
    println!("cargo::rerun-if-changed=build.rs");
    let list = fs::read_to_string("symbols.txt").expect("symbols.txt lies beside build.rs");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("stubs.rs");
    fs::write(out, stubs(&list)).expect("OUT_DIR is writable");
}

/// One `stub!` line for each symbol whose second column lists its arguments.
fn stubs(list: &str) -> String {
    let mut text = String::new();
    for line in list.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let (name, arguments) = line.split_once(' ').unwrap_or((line, "void"));
        if arguments == "real" {
            continue;
        }
        write!(text, "stub!({name}").expect("writing to a string");
        for (at, kind) in arguments.split(',').filter(|kind| *kind != "void").enumerate() {
            let kind = match kind {
                "device" => "DeviceArgument",
                "pointer" => "PointerArgument",
                "word" => "WordArgument",
                "long" => "LongArgument",
                other => panic!("symbols.txt: {name} has an argument of unknown kind {other}"),
            };
            write!(text, ", a{at}: {kind}").expect("writing to a string");
        }
        text.push_str(");\n");
    }
    text
}
