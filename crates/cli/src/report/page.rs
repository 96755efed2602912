//! The page: `page.html` with its places filled in. Nothing in it is fetched from elsewhere, and no script runs: that which is
//! there is the report as JSON.

use super::escape::{embedded, escaped};
use super::figure::{Figure, Report, Table, Verdict};
use super::svg::{Place, STYLE, svg};

impl Report {
    /// The page as HTML.
    ///
    /// # Errors
    ///
    /// If the report has no JSON.
    pub(super) fn html(&self) -> Result<String, serde_json::Error> {
        let fact = |(name, value): &(&str, String)| {
            format!("<div><dt>{}</dt><dd>{}</dd></div>\n", escaped(name), escaped(value))
        };
        let line = |line: &str| match line.starts_with("export ") {
            true => format!("<code>{}</code>", escaped(line)),
            false => escaped(line),
        };
        let verdict = |Verdict { name, text, .. }: &Verdict| {
            let lines: Vec<_> = text.lines().map(line).collect();
            format!("<p><strong>{}</strong>: {}</p>\n", escaped(name), lines.join("<br>\n"))
        };
        Ok(format!(
            include_str!("page.html"),
            title = escaped(self.title),
            source = escaped(&self.source),
            verdicts = self.verdicts.iter().map(verdict).collect::<String>(),
            facts = self.facts.iter().map(fact).collect::<String>(),
            mood = if self.verdicts.iter().any(|verdict| verdict.is_alarm) { "alarm" } else { "calm" },
            refresh = self
                .refresh_seconds
                .map_or_else(String::new, |seconds| format!("<meta http-equiv=\"refresh\" content=\"{seconds}\">\n")),
            figures = self.figures.iter().map(section).collect::<String>(),
            notes = notes(&self.notes),
            tables = self.tables.iter().map(table).collect::<String>(),
            version = env!("CARGO_PKG_VERSION"),
            css = [include_str!("page.css"), STYLE].concat(),
            data = embedded(&serde_json::to_string(self)?),
        ))
    }
}

fn section(figure: &Figure) -> String {
    let (wide, narrow) = (svg(figure, Place::Wide), svg(figure, Place::Narrow));
    let (id, title, words) = (figure.id, escaped(figure.title), escaped(&figure.description));
    format!(
        "<section id=\"{id}\">\n<h2>{title}</h2>\n<figure>\n<figcaption>{words}</figcaption>\n{wide}{narrow}</figure>\n\
         </section>\n"
    )
}

fn notes(notes: &[String]) -> String {
    let notes: String = notes.iter().map(|note| format!("<li>{}</li>\n", escaped(note))).collect();
    if notes.is_empty() { notes } else { format!("<section>\n<h2>Notes</h2>\n<ul>\n{notes}</ul>\n</section>\n") }
}

fn table(Table { is_open, name, head, rows }: &Table) -> String {
    let row = |row: &[String; 4]| {
        format!("<tr>{}</tr>\n", row.iter().map(|cell| format!("<td>{}</td>", escaped(cell))).collect::<String>())
    };
    let head: String = head.iter().map(|cell| format!("<th scope=\"col\">{}</th>", escaped(cell))).collect();
    let rows: String = rows.iter().map(row).collect();
    let name = escaped(name);
    let open = if *is_open { " open" } else { "" };
    format!("<details{open}>\n<summary>{name}</summary>\n<table>\n<tr>{head}</tr>\n{rows}</table>\n</details>\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_of_the_template_is_filled() {
        let report = Report {
            title: "{{facts}} <b>",
            source: "a \"quoted\" file".to_owned(),
            verdicts: vec![Verdict {
                name: "steady".to_owned(),
                text: "nothing <to> set\nexport A=1".to_owned(),
                is_alarm: false,
            }],
            facts: vec![("gets", "1,234".to_owned())],
            tables: vec![Table {
                is_open: true,
                name: "raises".to_owned(),
                head: ["a", "b", "c", "d"],
                rows: vec![["1", "2", "<3>", "4"].map(str::to_owned)],
            }],
            notes: vec!["left <out>".to_owned()],
            ..Report::default()
        };
        let html = report.html().unwrap();
        assert!(html.contains("<title>{{facts}} &lt;b&gt;</title>"), "{html}");
        assert!(html.contains("<strong>steady</strong>: nothing &lt;to&gt; set<br>\n<code>export A=1</code>"));
        assert!(html.contains("<li>left &lt;out&gt;</li>") && html.contains("<dd>1,234</dd>"));
        assert!(html.contains("<td>2</td><td>&lt;3&gt;</td>"), "{html}");
        assert!(html.contains("<details open>") && html.contains("class=\"verdict calm\""), "{html}");
        assert_eq!(html.matches("{{").count(), 3, "the title, twice and in the data: {html}");
        assert_eq!(html.matches("<script").count(), 1, "the data: {html}");
        let fetches = ["http://", "https://", "src=\"", "@import", "url("];
        for fetch in fetches {
            assert!(!html.contains(fetch), "{fetch}");
        }
    }
}
