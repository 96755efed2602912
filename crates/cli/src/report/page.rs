//! The page: `page.html` with its places filled in. Nothing in it is fetched from elsewhere, and no script runs.

use std::error::Error;
use std::fmt::Write;

use super::draw::{Place, svg};
use super::escape::escaped;
use super::figure::Figure;
use super::style::css;

const PAGE: &str = include_str!("page.html");

/// What a page says.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) title: String,
    /// Where it is from, in words.
    pub(super) source: String,
    pub(super) verdicts: Vec<Verdict>,
    /// Names and values.
    pub(super) facts: Vec<(&'static str, String)>,
    pub(super) figures: Vec<Figure>,
    /// What is left out, and why; what is a lower bound.
    pub(super) notes: Vec<String>,
    pub(super) table: Option<Table>,
}

/// One pool's.
#[derive(Debug)]
pub(super) struct Verdict {
    pub(super) name: String,
    /// What it means and what to set.
    pub(super) text: String,
}

/// Rows that open at a click.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) name: String,
    pub(super) head: Vec<&'static str>,
    pub(super) rows: Vec<Vec<String>>,
}

impl Report {
    /// The page as HTML.
    ///
    /// # Errors
    ///
    /// If a figure cannot be drawn.
    pub(super) fn html(&self) -> Result<String, Box<dyn Error>> {
        let mut figures = String::new();
        for figure in &self.figures {
            figures += &section(figure)?;
        }
        let version = env!("CARGO_PKG_VERSION");
        let footer = format!("Drawn by pinpool {version}. The page is complete in itself: it needs no network.");
        let places = [
            ("title", escaped(&self.title)),
            ("source", escaped(&self.source)),
            ("verdicts", self.verdicts()),
            ("facts", self.facts()),
            ("figures", figures),
            ("notes", self.notes() + &self.table()),
            ("footer", escaped(&footer)),
            ("figure_css", css()),
        ];
        Ok(filled(PAGE, &places))
    }

    fn verdicts(&self) -> String {
        let verdict = |Verdict { name, text }: &Verdict| {
            format!("<p><strong>{}</strong>: {}</p>\n", escaped(name), escaped(text))
        };
        self.verdicts.iter().map(verdict).collect()
    }

    fn facts(&self) -> String {
        let fact = |(name, value): &(&str, String)| {
            format!("<div><dt>{}</dt><dd>{}</dd></div>\n", escaped(name), escaped(value))
        };
        self.facts.iter().map(fact).collect()
    }

    fn notes(&self) -> String {
        if self.notes.is_empty() {
            return String::new();
        }
        let notes: String = self.notes.iter().map(|note| format!("<li>{}</li>\n", escaped(note))).collect();
        format!("<section>\n<h2>Notes</h2>\n<ul>\n{notes}</ul>\n</section>\n")
    }

    fn table(&self) -> String {
        let Some(Table { name, head, rows }) = &self.table else { return String::new() };
        let mut text = format!("<details>\n<summary>{}</summary>\n<table>\n<tr>", escaped(name));
        for cell in head {
            // Writing to a string does not fail.
            let _ = write!(text, "<th scope=\"col\">{}</th>", escaped(cell));
        }
        text += "</tr>\n";
        for row in rows {
            text += "<tr>";
            for cell in row {
                let _ = write!(text, "<td>{}</td>", escaped(cell));
            }
            text += "</tr>\n";
        }
        text + "</table>\n</details>\n"
    }
}

fn section(figure: &Figure) -> Result<String, Box<dyn Error>> {
    Ok(format!(
        "<section id=\"{}\">\n<h2>{}</h2>\n<figure>\n<figcaption>{}</figcaption>\n{}{}</figure>\n</section>\n",
        figure.id,
        escaped(figure.title),
        escaped(&figure.description),
        svg(figure, Place::Wide)?,
        svg(figure, Place::Narrow)?
    ))
}

/// The template with each `{{name}}` replaced, in one pass: a value that looks like a place stays as it is.
fn filled(template: &str, places: &[(&str, String)]) -> String {
    let mut parts = template.split("{{");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part.split_once("}}").unwrap_or(("", part));
        let value = places.iter().find(|(known, _)| *known == name).map_or("", |(_, value)| value);
        text += value;
        text += rest;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_of_the_template_is_filled() {
        let report = Report {
            title: "{{facts}} <b>".to_owned(),
            source: "a \"quoted\" file".to_owned(),
            verdicts: vec![Verdict { name: "steady".to_owned(), text: "nothing <to> set".to_owned() }],
            facts: vec![("gets", "1,234".to_owned())],
            notes: vec!["left <out>".to_owned()],
            ..Report::default()
        };
        let html = report.html().unwrap();
        assert!(html.contains("<title>{{facts}} &lt;b&gt;</title>"), "{html}");
        assert!(html.contains("<strong>steady</strong>: nothing &lt;to&gt; set"));
        assert!(html.contains("<li>left &lt;out&gt;</li>") && html.contains("<dd>1,234</dd>"));
        assert_eq!(html.matches("{{").count(), 2, "the title, twice: {html}");
        let fetches = ["http://", "https://", "<script", "src=\"", "@import", "url("];
        for fetch in fetches {
            assert!(!html.contains(fetch), "{fetch}");
        }
    }
}
