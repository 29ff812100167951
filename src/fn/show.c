/*
 * show.c
 *		Text of other roles as an operator reads it: idem_visible, idem_visible_literal,
 *		idem_visible_name.
 *
 * Queues, workers, roles and applications have names that any role can choose.  With a control or
 * a bidirectional character in it, a name can rearrange the line in which a terminal or a browser
 * shows it, and one command can look like another.  H1 to H3: idem_doctor(), idem_why(),
 * idem_holder() and idem_report() show each such character as an escape.  In the literals and
 * identifiers of a command the escape means the character, so that the command still works.
 */
#include "postgres.h"

#include "lib/stringinfo.h"

#include "fn/fn.h"

IDEM_FUNCTION(idem_visible);
IDEM_FUNCTION(idem_visible_literal);
IDEM_FUNCTION(idem_visible_name);

/* Characters that draw nothing, or move what stands beside them; in ascending order */
static const struct
{
	pg_wchar first;
	pg_wchar last;
} hidden_ranges[] = {
	{0x0000, 0x001F}, /* control characters */
	{0x007F, 0x009F},
	{0x00AD, 0x00AD},	/* soft hyphen */
	{0x034F, 0x034F},	/* combining grapheme joiner */
	{0x061C, 0x061C},	/* Arabic letter mark */
	{0x115F, 0x1160},	/* Hangul fillers */
	{0x17B4, 0x17B5},	/* Khmer inherent vowels */
	{0x180B, 0x180F},	/* Mongolian selectors */
	{0x200B, 0x200F},	/* zero width, direction marks */
	{0x2028, 0x202E},	/* line and paragraph separator, embeddings, overrides */
	{0x2060, 0x206F},	/* invisible operators, isolates */
	{0x3164, 0x3164},	/* Hangul filler */
	{0xFE00, 0xFE0F},	/* variation selectors */
	{0xFEFF, 0xFEFF},	/* zero width no-break space */
	{0xFFA0, 0xFFA0},	/* halfwidth Hangul filler */
	{0xFFF0, 0xFFFB},	/* interlinear annotations */
	{0x1BCA0, 0x1BCA3}, /* shorthand format controls */
	{0x1D173, 0x1D17A}, /* musical format controls */
	{0xE0000, 0xE0FFF}, /* tags, variation selectors */
};

/*
 * The code point of the character at this place, and its length in bytes.  In a database without
 * an encoding it is mostly UTF-8.  Of the other encodings, only ASCII and the control characters of
 * ISO 8859 are looked at: none of them has the other hidden characters.
 */
static pg_wchar
get_character(const char *place, int *length)
{
	const unsigned char *byte = (const unsigned char *) place;
	int encoding = GetDatabaseEncoding();

	*length = 1;
	if ((encoding == PG_UTF8 || encoding == PG_SQL_ASCII) && *byte >= 0x80)
	{
		int nbytes = pg_utf_mblen(byte);

		if ((int) strnlen(place, nbytes) < nbytes || !pg_utf8_islegal(byte, nbytes))
			return 0xFFFD;
		*length = nbytes;
		return utf8_to_unicode(byte);
	}
	if (*byte < 0x80 || (encoding >= PG_LATIN1 && encoding <= PG_LATIN5) ||
		(encoding >= PG_LATIN6 && encoding <= PG_LATIN10) ||
		(encoding >= PG_ISO_8859_5 && encoding <= PG_ISO_8859_8))
		return *byte;
	return 0xFFFD;
}

static bool
is_hidden(pg_wchar character)
{
	for (int i = 0; i < (int) lengthof(hidden_ranges) && hidden_ranges[i].first <= character; i++)
	{
		if (character <= hidden_ranges[i].last)
			return true;
	}
	return false;
}

static bool
has_hidden(const char *text)
{
	int length;

	for (; *text != '\0'; text += length)
	{
		if (is_hidden(get_character(text, &length)))
			return true;
	}
	return false;
}

/*
 * A form in which text is shown.  An escape has four digits after the small, or six after the large
 * beginning.
 */
typedef struct Form
{
	const char *begin;
	const char *small;
	const char *large;
	const char *doubled; /* characters that are written twice */
	const char *kept;	 /* control characters that are not hidden */
	const char *end;
} Form;

static const Form as_text = {"", "\\u", "\\U00", "", "\n\t", ""};
/* works under every setting of standard_conforming_strings */
static const Form as_literal = {"E'", "\\u", "\\U00", "'\\", "", "'"};
static const Form as_name = {"U&\"", "\\", "\\+", "\"\\", "", "\""};

static char *
escape_text(const char *text, const Form *form)
{
	StringInfoData buf;
	int length;

	initStringInfo(&buf);
	appendStringInfoString(&buf, form->begin);
	for (; *text != '\0'; text += length)
	{
		pg_wchar character = get_character(text, &length);

		if (!is_hidden(character) ||
			(character < 0x80 && strchr(form->kept, (int) character) != NULL))
		{
			if (length == 1 && strchr(form->doubled, *text) != NULL)
				appendStringInfoChar(&buf, *text);
			appendBinaryStringInfo(&buf, text, length);
		}
		else if (character >= 0x80 && GetDatabaseEncoding() == PG_SQL_ASCII)
		{
			/* without an encoding, the server takes only escapes for bytes */
			for (int i = 0; i < length; i++)
				appendStringInfo(&buf, "\\x%02X", (unsigned char) text[i]);
		}
		else if (character <= 0xFFFF)
			appendStringInfo(&buf, "%s%04X", form->small, character);
		else
			appendStringInfo(&buf, "%s%06X", form->large, character);
	}
	appendStringInfoString(&buf, form->end);
	return buf.data;
}

/* The text with hidden characters as \u202E; line breaks and tabs are unchanged */
static char *
show_text(const char *text)
{
	return escape_text(text, &as_text);
}

/* A literal for a command */
static char *
show_literal(const char *text)
{
	return has_hidden(text) ? escape_text(text, &as_literal) : quote_literal_cstr(text);
}

/* A name for a command */
char *
idem_show_name(const char *name)
{
	return has_hidden(name) ? escape_text(name, &as_name) : pstrdup(quote_identifier(name));
}

static Datum
show_argument(FunctionCallInfo fcinfo, IdemSignature *signature, char *(*form)(const char *text))
{
	idem_fn_begin(fcinfo, signature, NULL);
	if (PG_ARGISNULL(0))
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text(form(text_to_cstring(PG_GETARG_TEXT_PP(0)))));
}

Datum
idem_visible(PG_FUNCTION_ARGS)
{
	return show_argument(fcinfo, &idem_visible_signature, show_text);
}

Datum
idem_visible_literal(PG_FUNCTION_ARGS)
{
	return show_argument(fcinfo, &idem_visible_literal_signature, show_literal);
}

Datum
idem_visible_name(PG_FUNCTION_ARGS)
{
	return show_argument(fcinfo, &idem_visible_name_signature, idem_show_name);
}
