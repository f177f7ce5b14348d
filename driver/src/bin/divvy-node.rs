fn main() -> std::process::ExitCode {
    divvy_driver::daemon::run::main()
}
