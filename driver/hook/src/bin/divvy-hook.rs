fn main() -> std::process::ExitCode {
    divvy_hook::main()
}
