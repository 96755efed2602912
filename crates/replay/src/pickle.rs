//! Data out of a Python pickle: dictionaries, lists, tuples, texts and numbers.
//!
//! Reads the codes by which `pickle` of Python 3 (protocols 2 to 5) and PyTorch's own pickler write such data, and refuses all
//! others, so nothing is called and no class is loaded. Values lie in one list and name each other by number: what a pickle
//! shares stays shared, so a few bytes cannot become many values, and no depth of nesting needs a deep stack.

/// Most values of a pickle, containers and their items: a gigabyte or so in memory.
const VALUES_MAX: usize = 40_000_000;

/// Why a pickle could not be read: what is wrong with it, and at which byte.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PickleError {
    pub(super) at: usize,
    pub(super) why: String,
}

/// A value of a [`Pickle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Id(u32);

#[derive(Debug)]
enum Value<'a> {
    /// `None`, numbers with a fraction, bytes: nothing that is asked for.
    Other,
    Number(i128),
    Text(&'a str),
    /// A list or a tuple.
    List(Vec<Id>),
    /// Keys and values in turn.
    Dictionary(Vec<Id>),
}

/// A pickle that was read.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    values: Vec<Value<'a>>,
    root: Id,
}

impl<'a> Pickle<'a> {
    /// Whether these are the first bytes of a pickle of protocol 2 or later.
    pub(super) fn is_begun_by(bytes: &[u8]) -> bool {
        matches!(bytes, [0x80, 2..=5, ..])
    }

    /// Reads `bytes`, of which nothing follows the pickle that is of interest.
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, PickleError> {
        let mut reader = Reader { bytes, ..Reader::default() };
        let root = reader.run().map_err(|why| PickleError { at: reader.at, why })?;
        Ok(Self { values: reader.values, root })
    }

    pub(super) fn root(&self) -> Id {
        self.root
    }

    fn value(&self, id: Id) -> &Value<'a> {
        self.values.get(id.0 as usize).unwrap_or(&Value::Other)
    }

    /// The value of a dictionary under `key`; the last one, as in Python.
    pub(super) fn get(&self, dictionary: Id, key: &str) -> Option<Id> {
        let Value::Dictionary(entries) = self.value(dictionary) else { return None };
        let mut pairs = entries.chunks_exact(2).rev();
        pairs.find(|pair| matches!(self.value(pair[0]), Value::Text(text) if *text == key)).map(|pair| pair[1])
    }

    /// The items of a list or a tuple.
    pub(super) fn list(&self, id: Id) -> Option<&[Id]> {
        if let Value::List(items) = self.value(id) { Some(items) } else { None }
    }

    pub(super) fn is_dictionary(&self, id: Id) -> bool {
        matches!(self.value(id), Value::Dictionary(_))
    }

    pub(super) fn text(&self, id: Id) -> Option<&'a str> {
        if let Value::Text(text) = self.value(id) { Some(text) } else { None }
    }

    pub(super) fn number(&self, id: Id) -> Option<i128> {
        if let Value::Number(number) = self.value(id) { Some(*number) } else { None }
    }
}

fn too_many() -> String {
    format!("more than {VALUES_MAX} values")
}

#[derive(Default)]
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value<'a>>,
    /// In all containers.
    items: usize,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: Vec<Option<Id>>,
}

impl<'a> Reader<'a> {
    fn run(&mut self) -> Result<Id, String> {
        loop {
            let begun = self.at;
            let code = self.take(1)?[0];
            match code {
                // PROTO and FRAME say nothing about the values.
                0x80 => drop(self.take(1)?),
                0x95 => drop(self.take(8)?),
                b'.' => return self.pop(),
                b'(' => self.marks.push(self.stack.len()),
                b'0' => drop(self.pop()?),
                b'1' => {
                    let first = self.mark()?;
                    self.stack.truncate(first);
                }
                b'2' => {
                    let top = self.top()?;
                    self.stack.push(top);
                }
                b'N' => self.push(Value::Other)?,
                0x88 => self.push(Value::Number(1))?,
                0x89 => self.push(Value::Number(0))?,
                b'J' => {
                    let number = i32::from_le_bytes(self.array()?);
                    self.push(Value::Number(number.into()))?;
                }
                b'K' => self.number(1)?,
                b'M' => self.number(2)?,
                0x8a => {
                    let len = self.length(1)?;
                    self.long(len)?;
                }
                0x8b => {
                    let len = self.length(4)?;
                    self.long(len)?;
                }
                b'G' => {
                    self.take(8)?;
                    self.push(Value::Other)?;
                }
                0x8c => self.text(1)?,
                b'X' => self.text(4)?,
                0x8d => self.text(8)?,
                b'C' => self.skip(1)?,
                b'B' => self.skip(4)?,
                0x8e => self.skip(8)?,
                b']' => self.push(Value::List(Vec::new()))?,
                b')' => self.push(Value::List(Vec::new()))?,
                b'}' => self.push(Value::Dictionary(Vec::new()))?,
                0x85..=0x87 => {
                    let first = self.below_top(usize::from(code - 0x84))?;
                    self.tuple(first)?;
                }
                b't' => {
                    let first = self.mark()?;
                    self.tuple(first)?;
                }
                b'a' => {
                    let first = self.below_top(1)?;
                    self.append(first, false)?;
                }
                b'e' => {
                    let first = self.mark()?;
                    self.append(first, false)?;
                }
                b's' => {
                    let first = self.below_top(2)?;
                    self.append(first, true)?;
                }
                b'u' => {
                    let first = self.mark()?;
                    self.append(first, true)?;
                }
                0x94 => self.remember(self.memo.len())?,
                b'q' => {
                    let index = self.length(1)?;
                    self.remember(index)?;
                }
                b'r' => {
                    let index = self.length(4)?;
                    self.remember(index)?;
                }
                b'h' => self.recall(1)?,
                b'j' => self.recall(4)?,
                _ => {
                    self.at = begun;
                    return Err(format!(
                        "code {code:#04x} makes an object of Python, and a snapshot is made of dictionaries, lists, texts and numbers"
                    ));
                }
            }
        }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(len).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| format!("cut off: the file ends at byte {}", self.bytes.len()))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        self.take(N)?.try_into().map_err(|_| "cut off".to_owned())
    }

    /// An unsigned number of `bytes` bytes.
    fn unsigned(&mut self, bytes: usize) -> Result<u64, String> {
        Ok(self.take(bytes)?.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    fn length(&mut self, bytes: usize) -> Result<usize, String> {
        usize::try_from(self.unsigned(bytes)?).map_err(|_| "a length over that of the file".to_owned())
    }

    fn number(&mut self, bytes: usize) -> Result<(), String> {
        let number = self.unsigned(bytes)?;
        self.push(Value::Number(number.into()))
    }

    /// A whole number of any length, of which those over 16 bytes are of no interest.
    fn long(&mut self, len: usize) -> Result<(), String> {
        let bytes = self.take(len)?;
        let sign = if bytes.last().is_some_and(|&last| last >= 0x80) { 0xff } else { 0 };
        let mut all = [sign; 16];
        let value = match all.get_mut(..len) {
            Some(low) => {
                low.copy_from_slice(bytes);
                Value::Number(i128::from_le_bytes(all))
            }
            None => Value::Other,
        };
        self.push(value)
    }

    fn text(&mut self, bytes: usize) -> Result<(), String> {
        let len = self.length(bytes)?;
        let text = std::str::from_utf8(self.take(len)?).map_err(|_| "a text that is not UTF-8")?;
        self.push(Value::Text(text))
    }

    fn skip(&mut self, bytes: usize) -> Result<(), String> {
        let len = self.length(bytes)?;
        self.take(len)?;
        self.push(Value::Other)
    }

    fn push(&mut self, value: Value<'a>) -> Result<(), String> {
        let id = u32::try_from(self.values.len()).ok().filter(|_| self.values.len() + self.items < VALUES_MAX);
        let id = id.ok_or_else(too_many)?;
        self.values.push(value);
        self.stack.push(Id(id));
        Ok(())
    }

    fn pop(&mut self) -> Result<Id, String> {
        self.stack.pop().ok_or_else(|| "a value is used that is not there".to_owned())
    }

    /// Where the `count` values on top begin.
    fn below_top(&self, count: usize) -> Result<usize, String> {
        self.stack.len().checked_sub(count).ok_or_else(|| "a value is used that is not there".to_owned())
    }

    fn top(&self) -> Result<Id, String> {
        self.stack.last().copied().ok_or_else(|| "a value is used that is not there".to_owned())
    }

    /// Where the values begin that were pushed since the last mark.
    fn mark(&mut self) -> Result<usize, String> {
        let first = self.marks.pop().filter(|&first| first <= self.stack.len());
        first.ok_or_else(|| "a mark is used that is not there".to_owned())
    }

    /// The values from `first` on, which leave the stack and become items of a container. They are counted before they are
    /// copied.
    fn items_from(&mut self, first: usize) -> Result<Vec<Id>, String> {
        self.items += self.stack.len() - first;
        if self.values.len() + self.items > VALUES_MAX {
            return Err(too_many());
        }
        Ok(self.stack.split_off(first))
    }

    fn tuple(&mut self, first: usize) -> Result<(), String> {
        let items = self.items_from(first)?;
        self.push(Value::List(items))
    }

    /// Adds the values from `first` on to the list or the dictionary below them.
    fn append(&mut self, first: usize, is_dictionary: bool) -> Result<(), String> {
        let items = self.items_from(first)?;
        let top = self.top()?.0 as usize;
        match self.values.get_mut(top) {
            Some(Value::List(all)) if !is_dictionary => all.extend(items),
            Some(Value::Dictionary(all)) if is_dictionary && items.len().is_multiple_of(2) => all.extend(items),
            _ => return Err("items of what is no list or dictionary".to_owned()),
        }
        Ok(())
    }

    fn remember(&mut self, index: usize) -> Result<(), String> {
        let top = self.top()?;
        // Numbers are given out in turn; a larger one is none.
        if index > self.memo.len() + 1024 {
            return Err(format!("value {index} is remembered after {}", self.memo.len()));
        }
        if index >= self.memo.len() {
            self.memo.resize(index + 1, None);
        }
        self.memo[index] = Some(top);
        Ok(())
    }

    fn recall(&mut self, bytes: usize) -> Result<(), String> {
        let index = self.length(bytes)?;
        let id =
            self.memo.get(index).copied().flatten().ok_or_else(|| format!("value {index} was never remembered"))?;
        if self.stack.len() >= VALUES_MAX {
            return Err(too_many());
        }
        self.stack.push(id);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(bytes: &[u8]) -> String {
        Pickle::read(bytes).unwrap_err().why
    }

    #[test]
    fn data_of_protocols_two_and_four_is_read() {
        // pickle.dumps({"a": [1, -2, 1 << 40, True], "b": ("x", None), "c": "x"}, 2)
        let two = b"\x80\x02}q\0(X\x01\0\0\0aq\x01]q\x02(K\x01J\xfe\xff\xff\xff\x8a\x06\0\0\0\0\0\x01\x88eX\x01\0\0\0bq\x03X\x01\0\0\0xq\x04N\x86q\x05X\x01\0\0\0cq\x06h\x04u.";
        let four = b"\x80\x04\x95\x30\0\0\0\0\0\0\0}\x94(\x8c\x01a\x94]\x94(K\x01J\xfe\xff\xff\xff\x8a\x06\0\0\0\0\0\x01\x88e\x8c\x01b\x94\x8c\x01x\x94N\x86\x94\x8c\x01c\x94h\x04u.";
        for bytes in [&two[..], four] {
            assert!(Pickle::is_begun_by(bytes));
            let pickle = Pickle::read(bytes).unwrap();
            let root = pickle.root();
            let a = pickle.list(pickle.get(root, "a").unwrap()).unwrap();
            let numbers: Vec<_> = a.iter().map(|&id| pickle.number(id)).collect();
            assert_eq!(numbers, [Some(1), Some(-2), Some(1 << 40), Some(1)]);
            let b = pickle.list(pickle.get(root, "b").unwrap()).unwrap();
            assert_eq!((b.len(), pickle.text(b[0]), pickle.text(b[1])), (2, Some("x"), None));
            assert_eq!(pickle.get(root, "c"), Some(b[0]), "shared");
            assert_eq!((pickle.get(root, "d"), pickle.get(b[0], "a")), (None, None));
        }
    }

    #[test]
    fn a_pickle_that_is_cut_off_anywhere_is_an_error() {
        let whole = b"\x80\x02}q\0(X\x01\0\0\0aq\x01]q\x02(K\x01M\x01\x02eu.";
        assert!(Pickle::read(whole).is_ok());
        for end in 0..whole.len() {
            assert!(error(&whole[..end]).contains("cut off"), "{end}");
        }
    }

    #[test]
    fn what_is_no_data_is_refused() {
        // os.system("true"), and codes that use what is not there.
        assert!(error(b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R.").contains("object of Python"));
        assert_eq!(Pickle::read(b"\x80\x02cos\n").unwrap_err().at, 2);
        for (bytes, why) in [
            (&b"\x80\x02."[..], "not there"),
            (b"\x80\x02e.", "mark"),
            (b"\x80\x02K\x01K\x02a.", "no list"),
            (b"\x80\x02}(K\x01u.", "no list or dictionary"),
            (b"\x80\x02h\x09.", "never remembered"),
            (b"\x80\x02K\x01r\0\0\0\x70.", "is remembered after 0"),
            (b"\x80\x02X\xff\xff\xff\xffab.", "cut off"),
            (b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "cut off"),
            (b"\x80\x02X\x01\0\0\0\xff.", "UTF-8"),
            (b"\x80\x02\x85.", "not there"),
            (b"\x80\x02(K\x01t0e.", "mark"),
            (b"\x80\x02K\x01(0t.", "mark"),
        ] {
            assert!(error(bytes).contains(why), "{bytes:?}: {}", error(bytes));
        }
    }

    #[test]
    fn neither_depth_nor_sharing_takes_more_than_the_file() {
        // A million lists, each in the next.
        let mut deep = b"\x80\x02".to_vec();
        deep.extend(vec![b']'; 1_000_000]);
        deep.extend(vec![b'a'; 999_999]);
        deep.push(b'.');
        assert!(Pickle::read(&deep).is_ok());
        // Each list holds the one before twice: 2^60 values if they were copied.
        let mut doubled = b"\x80\x02]\x94".to_vec();
        for n in 0..60_u8 {
            doubled.extend([b']', 0x94, b'(', b'h', n, b'h', n, b'e']);
        }
        doubled.push(b'.');
        assert!(Pickle::read(&doubled).is_ok());
    }

    #[test]
    fn items_that_are_too_many_are_not_copied() {
        let stack = vec![Id(0); 3];
        let mut reader = Reader { items: VALUES_MAX - 2, stack, ..Reader::default() };
        let refused = reader.tuple(0).unwrap_err();
        assert!(refused.contains("more than 40000000 values"), "{refused}");
        assert_eq!((reader.stack.len(), reader.values.len()), (3, 0));
    }
}
