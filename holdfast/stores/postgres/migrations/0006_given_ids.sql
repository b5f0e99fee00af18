-- expand. A job submitted from SQL says, too, that its id was chosen by its client: such an id may return.

-- What only some jobs carry, as text; null for a plain job.
create or replace function holdfast.checked_options(turn bigint, job json) returns text language plpgsql as $$
declare
    field text;
    given json;
    parts text[] := case when job ->> 'id' is null then '{}'::text[] else array['"given_id":true'] end;
begin
    foreach field in array array['timeout', 'retry', 'metadata', 'tags'] loop
        given := job -> field;
        continue when given is null or json_typeof(given) = 'null';
        if field = 'timeout' then
            if coalesce(holdfast.checked_span(turn, field, given, '30 days'), 0) = 0 then
                perform holdfast.refuse(turn, field, given::text, 'give more than 0 seconds; leave it out for no timeout');
            end if;
            parts := array_append(parts, '"timeout":' || trim_scale(holdfast.checked_span(turn, field, given, '30 days') / 1000000.0));
        elsif field = 'retry' then
            parts := array_append(parts, '"retry":' || holdfast.checked_retry(turn, given));
        elsif field = 'metadata' then
            perform holdfast.check_object(turn, field, given, 16384);
            parts := array_append(parts, '"metadata":' || given::text);
        elsif json_typeof(given) <> 'array' or json_array_length(given) > 100
            or exists (select from json_array_elements(given) e where json_typeof(e) <> 'string') then
            perform holdfast.refuse(turn, field, given::text, 'give a list of at most 100 texts');
        elsif json_array_length(given) > 0 then
            parts := array_append(parts, '"tags":' || (
                select json_agg(t.tag order by t.place)::text from (
                    select holdfast.checked_text(turn, field, e.tag, 100) as tag, min(e.place) as place
                    from json_array_elements(given) with ordinality e (tag, place) group by 1) t));
        end if;
    end loop;
    return case when cardinality(parts) > 0 then '{' || array_to_string(parts, ',') || '}' end;
end
$$;
