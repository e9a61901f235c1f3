"""What the compiler did, shown: records, texts, dumps, the viewer page, drawings."""
