fn main() -> std::process::ExitCode {
    divvy_controller::main()
}
