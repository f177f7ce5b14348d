fn main() -> std::process::ExitCode {
    divvy_mps_supervisor::main()
}
