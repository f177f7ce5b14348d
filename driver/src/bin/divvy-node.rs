fn main() -> std::process::ExitCode {
    divvy_driver::node::main()
}
