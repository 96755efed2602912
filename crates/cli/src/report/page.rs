//! The page: `page.html` with its places filled in. Everything it needs is inside: the report as JSON, uPlot and `page.js`.

use super::escape::{embedded, escaped};
use super::figure::{Figure, Report, Table, Verdict};

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
        Ok(format!(
            include_str!("page.html"),
            title = escaped(self.title),
            source = escaped(&self.source),
            verdicts = self.verdicts.iter().map(verdict).collect::<String>(),
            facts = self.facts.iter().map(fact).collect::<String>(),
            figures = self.figures.iter().map(section).collect::<String>(),
            notes = notes(&self.notes),
            tables = self.tables.iter().map(table).collect::<String>(),
            version = env!("CARGO_PKG_VERSION"),
            css = [include_str!("uplot.css"), include_str!("page.css")].concat(),
            license = include_str!("uplot.LICENSE"),
            library = include_str!("uplot.js"),
            script = include_str!("page.js"),
            data = embedded(&serde_json::to_string(self)?),
        ))
    }
}

fn verdict(Verdict { name, text, is_alarm }: &Verdict) -> String {
    let line = |line: &str| match line.starts_with("export ") {
        true => format!("<code>{}</code>", escaped(line)),
        false => escaped(line),
    };
    let lines: Vec<_> = text.lines().map(line).collect();
    let mood = if *is_alarm { "alarm" } else { "calm" };
    format!(
        "<p class=\"verdict {mood}\" role=\"note\"><strong>{}</strong>: {}</p>\n",
        escaped(name),
        lines.join("<br>\n")
    )
}

fn section(figure: &Figure) -> String {
    let (id, title, words) = (figure.id, escaped(figure.title), escaped(&figure.description));
    format!(
        "<section>\n<h2>{title}</h2>\n<figure id=\"{id}\">\n<figcaption>{words}</figcaption>\n</figure>\n</section>\n"
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
    fn every_place_of_the_template_is_filled_and_nothing_is_fetched() {
        let verdict =
            Verdict { name: "steady".to_owned(), text: "nothing <to> set\nexport A=1".to_owned(), is_alarm: false };
        let report = Report {
            title: "{{facts}} <b>",
            source: "a \"quoted\" file".to_owned(),
            verdicts: vec![verdict],
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
        assert!(html.contains("Copyright (c) 2022 Leon Sorokin") && html.contains("MERCHANTABILITY"));
        for fetch in ["src=", "@import", "url(", "fetch(", "XMLHttpRequest"] {
            assert!(!html.contains(fetch), "{fetch}");
        }
    }
}
