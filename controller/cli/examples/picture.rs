//! Draws the share scene of a demo's output as the pictures of the README, in light and dark:
//!
//! `cargo run -- demo | cargo run -p divvy --example picture -- docs/src/images`

use anyhow::{Context, Result, ensure};
use std::fmt::Write;
use std::path::PathBuf;

/// First line of the scene. It ends with the next heading.
const SCENE: &str = "Shares:";
const FONT_PX: usize = 14;
const LINE_PX: usize = 19;
/// Width of a character of the font.
const COLUMN_PX: f64 = 8.43;
const MARGIN_PX: usize = 16;
const COLUMNS: usize = 80;

struct Theme {
    file: &'static str,
    background: &'static str,
    text: &'static str,
    done: &'static str,
    refused: &'static str,
    bar: &'static str,
}

const THEMES: [Theme; 2] = [
    Theme {
        file: "demo-light.svg",
        background: "#ffffff",
        text: "#1f2328",
        done: "#1a7f37",
        refused: "#9a6700",
        bar: "#0969da",
    },
    Theme {
        file: "demo-dark.svg",
        background: "#0d1117",
        text: "#e6edf3",
        done: "#3fb950",
        refused: "#d29922",
        bar: "#58a6ff",
    },
];

fn main() -> Result<()> {
    let directory = PathBuf::from(std::env::args().nth(1).context("usage: picture DIRECTORY < OUTPUT")?);
    let output = std::io::read_to_string(std::io::stdin())?;
    let scene = scene(&output);
    ensure!(scene.len() > 1, "the input has no line that begins with {SCENE:?}");
    for theme in THEMES {
        let path = directory.join(theme.file);
        std::fs::write(&path, draw(&scene, &theme))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The command, and the lines of the scene.
fn scene(output: &str) -> Vec<&str> {
    let scene = output.lines().skip_while(|line| !line.starts_with(SCENE));
    let scene = scene.take_while(|line| !line.is_empty());
    std::iter::once("$ cargo run -- demo").chain(scene).collect()
}

fn draw(lines: &[&str], theme: &Theme) -> String {
    let width = (COLUMNS as f64 * COLUMN_PX) as usize + 2 * MARGIN_PX;
    let height = lines.len() * LINE_PX + 2 * MARGIN_PX;
    let Theme { background, text, done, refused, bar, .. } = theme;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\">\n\
         <rect width=\"{width}\" height=\"{height}\" rx=\"8\" fill=\"{background}\"/>\n\
         <g font-family=\"ui-monospace,SFMono-Regular,Menlo,Consolas,monospace\" font-size=\"{FONT_PX}\" \
         xml:space=\"preserve\" fill=\"{text}\">\n"
    );
    for (number, line) in lines.iter().enumerate() {
        let y = MARGIN_PX + (number + 1) * LINE_PX - (LINE_PX - FONT_PX);
        let is_drawing = line.contains('|') || line.contains(['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█']);
        let attributes = match *line {
            line if number == 1 || line.starts_with('$') => " font-weight=\"bold\"".to_owned(),
            line if line.starts_with("  ok") => format!(" fill=\"{done}\""),
            line if line.starts_with("  --") => format!(" fill=\"{refused}\""),
            _ if is_drawing => format!(" fill=\"{bar}\""),
            _ => String::new(),
        };
        // A fixed length keeps bars aligned in every font.
        let length = line.chars().count() as f64 * COLUMN_PX;
        let line = line.replace('&', "&amp;").replace('<', "&lt;");
        // Writing to a String cannot fail.
        let _ = writeln!(
            svg,
            "<text x=\"{MARGIN_PX}\" y=\"{y}\" textLength=\"{length:.1}\" \
             lengthAdjust=\"spacingAndGlyphs\"{attributes}>{line}</text>"
        );
    }
    svg + "</g>\n</svg>\n"
}
