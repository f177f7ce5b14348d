fn main() -> std::process::ExitCode {
    divvy_keeper::main()
}
