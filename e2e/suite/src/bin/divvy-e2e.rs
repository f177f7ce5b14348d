fn main() -> std::process::ExitCode {
    divvy_e2e::main()
}
